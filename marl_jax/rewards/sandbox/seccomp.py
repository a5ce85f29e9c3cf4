"""The system calls a sandboxed program may make: an allow-list compiled to classic BPF, without libseccomp.

A call that is not listed fails with EPERM (with ENOSYS if it is newer than the list, so that libc falls back); a call
of a foreign instruction set kills. There is no fork and no exec: a program is one process for life.
"""

import ctypes
import errno
import os
import platform
import struct
import sys

# name, number on x86_64, number on aarch64 ("-": the call does not exist there)
_ALLOWED = """
read 0 63;write 1 64;readv 19 65;writev 20 66;pread64 17 67;pwrite64 18 68;preadv 295 69;pwritev 296 70
open 2 -;openat 257 56;close 3 57;close_range 436 436;lseek 8 62;dup 32 23;dup2 33 -;dup3 292 24
stat 4 -;fstat 5 80;lstat 6 -;newfstatat 262 79;statx 332 291;statfs 137 43;fstatfs 138 44
access 21 -;faccessat 269 48;faccessat2 439 439;readlink 89 -;readlinkat 267 78;getdents64 217 61
rename 82 -;renameat 264 38;renameat2 316 276;mkdir 83 -;mkdirat 258 34;rmdir 84 -;unlink 87 -;unlinkat 263 35
link 86 -;linkat 265 37;symlink 88 -;symlinkat 266 36;chmod 90 -;fchmod 91 52;fchmodat 268 53;umask 95 166
truncate 76 45;ftruncate 77 46;fallocate 285 47;fsync 74 82;fdatasync 75 83;utimensat 280 88;fadvise64 221 223
sendfile 40 71;copy_file_range 326 285;getcwd 79 17;chdir 80 49;fchdir 81 50
mmap 9 222;mprotect 10 226;munmap 11 215;mremap 25 216;madvise 28 233;brk 12 214;msync 26 227
rt_sigaction 13 134;rt_sigprocmask 14 135;rt_sigreturn 15 139;rt_sigpending 127 136;rt_sigsuspend 130 133
rt_sigtimedwait 128 137;sigaltstack 131 132;kill 62 129;tkill 200 130;tgkill 234 131;pause 34 -
pipe 22 -;pipe2 293 59;select 23 -;pselect6 270 72;poll 7 -;ppoll 271 73;eventfd2 290 19
epoll_create 213 -;epoll_create1 291 20;epoll_ctl 233 21;epoll_wait 232 -;epoll_pwait 281 22
recvfrom 45 207;shutdown 48 210;getsockname 51 204;getpeername 52 205;getsockopt 55 209
nanosleep 35 101;clock_nanosleep 230 115;clock_gettime 228 113;clock_getres 229 114;gettimeofday 96 169
time 201 -;alarm 37 -;setitimer 38 103;getitimer 36 102;times 100 153;restart_syscall 219 128
getpid 39 172;gettid 186 178;getppid 110 173;getuid 102 174;geteuid 107 175;getgid 104 176;getegid 108 177
getresuid 118 148;getresgid 120 150;getgroups 115 158;getpgrp 111 -;getpgid 121 155;getsid 124 156
uname 63 160;sysinfo 99 179;getrusage 98 165;getrlimit 97 163;setrlimit 160 164;getrandom 318 278
sched_yield 24 124;sched_getaffinity 204 123;futex 202 98;set_robust_list 273 99;get_robust_list 274 100
rseq 334 293;set_tid_address 218 96;arch_prctl 158 -;membarrier 324 283
listxattr 194 11;llistxattr 195 12;flistxattr 196 13
wait4 61 260;waitid 247 95;exit 60 93;exit_group 231 94
"""
_REACHES_OTHERS = {"kill", "tkill", "tgkill", "chmod", "fchmodat", "utimensat", "truncate"}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# Allowed for some arguments only.
_CLONE, _CLONE3, _IOCTL = (56, 220), (435, 435), (16, 29)
_FCNTL, _PRLIMIT, _PRCTL, _SOCKETPAIR, _SENDTO = (72, 25), (302, 261), (157, 167), (53, 199), (44, 206)
_CLONE_THREAD = 0x00010000
_CLONE_NEW_ANY = 0x7E020080  # every namespace flag
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
# F_DUPFD, F_(GET/SET)FD, F_(GET/SET)FL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. No locks or leases, which are visible
# to other programs that have the same library open, and no owner, to whom the kernel would send a chosen signal.
_FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)
_PRCTLS = (15, 16)  # the thread's name
_FIRST_SHARED_NUMBER = 424  # from here on numbers are the same everywhere, and the calls are recent

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


def supported() -> bool:
    """Whether the table covers this machine."""
    return sys.platform == "linux" and platform.machine() in _COLUMN


def program(alone: bool = True) -> bytes:
    """The filter as BPF instructions; `alone=False` if processes and files of others are visible."""
    column = _COLUMN[platform.machine()]
    code = [
        (_LOAD, 0, 0, 4),  # seccomp_data.arch
        (_EQUAL, 1, 0, _AUDIT_ARCH[platform.machine()]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),  # seccomp_data.nr
    ]
    for entry in _ALLOWED.replace("\n", ";").split(";"):
        name, *known = entry.split() or [""]
        if name and known[column] != "-" and (alone or name not in _REACHES_OTHERS):
            code += [(_EQUAL, 0, 1, int(known[column])), (_RETURN, 0, 0, _ALLOW)]

    def special(numbers, rule):
        code.append((_EQUAL, 0, len(rule), numbers[column]))
        code.extend(rule)

    deny = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    allow = (_RETURN, 0, 0, _ALLOW)
    # The flags of clone3 are in memory, which a filter cannot read.
    special(_CLONE3, [(_RETURN, 0, 0, _ERRNO | errno.ENOSYS)])
    special(
        _CLONE,
        [_argument(0), (_ANY_BIT, 0, 2, _CLONE_THREAD), (_ANY_BIT, 1, 0, _CLONE_NEW_ANY), allow, deny],
    )
    for numbers, index, values in (
        (_IOCTL, 1, _IOCTLS),
        (_FCNTL, 1, _FCNTLS),
        (_PRCTL, 0, _PRCTLS),
        (_PRLIMIT, 0, (0,)),
        (_SOCKETPAIR, 0, (1,)),
    ):
        tests = [step for value in values for step in ((_EQUAL, 0, 1, value), allow)]
        special(numbers, [_argument(index), *tests, deny])
    # A datagram to a named address would leave the pair; asyncio only ever sends to the other end.
    special(
        _SENDTO, [_argument(4), (_EQUAL, 0, 3, 0), _argument(4, high=True), (_EQUAL, 0, 1, 0), allow, deny]
    )
    code += [(_AT_LEAST, 0, 1, _FIRST_SHARED_NUMBER), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS), deny]
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def install(instructions: bytes) -> None:
    """Bind this process and its threads to the filter, permanently."""
    libc = ctypes.CDLL(None, use_errno=True)
    body = ctypes.create_string_buffer(instructions, len(instructions))
    head = ctypes.create_string_buffer(struct.pack("@HP", len(instructions) // 8, ctypes.addressof(body)))
    set_no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if libc.prctl(set_no_new_privileges, 1, 0, 0, 0) or libc.prctl(set_seccomp, mode_filter, head, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl: no seccomp filters (CONFIG_SECCOMP_FILTER): {os.strerror(number)}")


def _argument(index, high=False):
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * high)
