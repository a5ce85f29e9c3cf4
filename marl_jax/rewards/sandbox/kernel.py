"""Isolation by Linux namespaces, in two steps: once for a zygote, and once more for each process it forks.

The zygote's root contains the standard library (read-only, without installed packages), five harmless devices and
`/box`, a small file system in memory that is new for each process; no /proc, no /sys, nothing of the host.
"""

import contextlib
import ctypes
import errno
import os
import resource
import socket
import struct
import sys
from collections.abc import Iterator

import seccomp

NOBODY = 1_900_000_000  # an id that owns nothing; root becomes it before anything untrusted runs
INSIDE = 1000  # the id a program sees
BOX = "/box"
_STACK = 128 << 20

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_EVERYTHING = _NEWUSER | _NEWNS | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096
_REC, _PRIVATE, _DETACH = 16384, 1 << 18, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def isolate_zygote() -> None:
    """Move into new namespaces and a new root; returns in a child that is the first process of its namespace.

    OSError names the step that the machine does not allow.
    """
    if not seccomp.supported():
        raise OSError(f"needs Linux on x86_64 or aarch64, this is {sys.platform} on {os.uname().machine}")
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    own_root = False
    if os.geteuid() == 0:
        # Real root builds the file system now, while it may still read a runtime in its home.
        own_root = _libc.unshare(_NEWNS) == 0
        if own_root:
            _new_root()
        _drop_root(proc)
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_EVERYTHING), "unshare: user namespaces are not allowed here")
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{INSIDE} {uid} 1"),
        ("gid_map", f"{INSIDE} {gid} 1"),
    ):
        with _step(name), open(os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc), "w") as file:
            file.write(line)
    if not own_root:
        _new_root()
    os.close(proc)
    first = os.fork()
    if first:
        _wait_as_shell_of(first)
    die_with_parent()
    socket.sethostname("sandbox")


def renew(box_bytes: int) -> str:
    """Prepare a fork: the next child gets a new process namespace and an empty box. Returns the path of the box."""
    with _step("pidfd_open"):
        pidfd = os.pidfd_open(os.getpid())
    try:
        _check(_libc.setns(pidfd, _NEWPID), "setns")
        _check(_libc.unshare(_NEWPID), "unshare a process namespace")
    finally:
        os.close(pidfd)
    options = f"size={box_bytes},nr_inodes=4096,mode=0755"
    _mount("tmpfs", BOX, "tmpfs", _NOSUID | _NODEV | _NOEXEC, options)
    return BOX


def discard() -> None:
    """Remove the files of a child that has ended."""
    _check(_libc.umount2(BOX.encode(), _DETACH), f"umount {BOX}")


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends."""
    set_parent_death_signal, sigkill = 1, 9
    if sys.platform == "linux":
        _check(_libc.prctl(set_parent_death_signal, sigkill, 0, 0, 0), "prctl: die with the parent")


def limit(memory_bytes: int, cpu_s: int, file_bytes: int, threads: int | None) -> None:
    """Resource limits of this process; a program cannot raise them again."""
    for name, value in (
        ("AS", memory_bytes),
        ("CPU", cpu_s),
        ("FSIZE", file_bytes),
        ("NPROC", threads),  # there is no fork, but a thread counts too
        ("NOFILE", 64),
        ("CORE", 0),
        ("MEMLOCK", 0),
        ("MSGQUEUE", 0),
    ):
        if value is not None and (which := getattr(resource, f"RLIMIT_{name}", None)) is not None:
            _set_limit(f"setrlimit {name}", which, value, value)
    # Programs that recurse raise this limit themselves; the stack counts as address space.
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    soft = _STACK if hard == resource.RLIM_INFINITY else min(_STACK, hard)
    _set_limit("setrlimit STACK", resource.RLIMIT_STACK, soft, hard)


def drop_privileges() -> None:
    """Give up the capabilities that a user namespace brings, permanently."""
    drop_bounding, set_dumpable, capabilities = 24, 4, 64
    for capability in range(capabilities):
        if _libc.prctl(drop_bounding, capability, 0, 0, 0):
            if capability and ctypes.get_errno() == errno.EINVAL:
                break  # past the last capability that this kernel knows
            _check(-1, "prctl: drop a capability")
    version_3 = (ctypes.c_uint32 * 2)(0x20080522, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(version_3, none), "capset")
    # A core limit of zero does not stop a core handler of the host; this does.
    _check(_libc.prctl(set_dumpable, 0, 0, 0, 0), "prctl: not dumpable")


def confine_files(box: str) -> None:
    """Without a new root: if the kernel has Landlock, let only the standard library and the box be opened."""
    create_ruleset, add_rule, restrict_self = 444, 445, 446  # the same numbers everywhere
    version = _libc.syscall(create_ruleset, None, ctypes.c_size_t(0), 1) if seccomp.supported() else 0
    if version < 1:
        return
    every_access = (1 << 13) - 1 | (1 << 13 if version > 1 else 0) | (1 << 14 if version > 2 else 0)
    write_file, read_file, read_directory = 2, 4, 8
    handled = struct.pack("=Q", every_access)
    rules = _libc.syscall(create_ruleset, handled, ctypes.c_size_t(len(handled)), 0)
    _check(rules, "landlock")
    allowed = {box: every_access, "/dev/null": write_file | read_file, "/dev/urandom": read_file}
    for path, access in {**allowed, **dict.fromkeys(_libraries(), read_file | read_directory)}.items():
        fd = os.open(path, os.O_PATH)
        _check(_libc.syscall(add_rule, rules, 1, struct.pack("=Qi", access, fd), 0), "landlock")
        os.close(fd)
    no_new_privileges = 38
    _check(_libc.prctl(no_new_privileges, 1, 0, 0, 0), "prctl: no new privileges")
    _check(_libc.syscall(restrict_self, rules, 0), "landlock")
    os.close(rules)


def _new_root() -> None:
    _mount(None, "/", None, _REC | _PRIVATE)
    root, libraries = "/tmp", _libraries()
    devices = [f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom")]
    # Opened before the new root hides them.
    opened = {path: os.open(path, os.O_PATH) for path in (*libraries, *devices)}
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=0755")
    for path, source in opened.items():
        target = root + path
        if path in libraries:
            os.makedirs(target)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        _mount(f"/proc/self/fd/{source}", target, None, _BIND)
        os.close(source)
        kept = os.statvfs(target).f_flag & (_NODEV | _NOEXEC)  # flags that the host set must stay set
        _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | kept)
    for packages in (
        f"{root}{path}/{name}" for path in libraries for name in ("site-packages", "dist-packages")
    ):
        if os.path.isdir(packages):
            _mount("tmpfs", packages, "tmpfs", _RDONLY | _NOSUID | _NODEV, "size=4k")
    os.mkdir(root + BOX)
    if not os.path.lexists(root + "/tmp"):  # a runtime may live there
        os.symlink(f"{BOX}/tmp", root + "/tmp")
    os.symlink(f"{BOX}/stdin", root + "/dev/stdin")
    if not os.path.lexists(root + "/dev/shm"):
        os.symlink(f"{BOX}/tmp", root + "/dev/shm")
    _mount(None, root, None, _REMOUNT | _BIND | _RDONLY | _NOSUID | _NODEV)
    os.chdir(root)
    _check(_libc.syscall(_PIVOT_ROOT[os.uname().machine], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", _DETACH), "umount the old root")
    os.chdir("/")


def _libraries() -> list[str]:
    """The directories of the standard library: one, or two if the compiled part is elsewhere."""
    paths: list[str] = []
    for path in sys.path:
        if os.path.isdir(path) and not any(path.startswith(f"{above}/") for above in paths):
            paths.append(path)
    return paths


def spare_id(table: str) -> int | None:
    """The id that root of a user namespace becomes: NOBODY, or the last of the few that a rootless container has.

    `table` is its uid_map or gid_map. None if only one id is mapped: to the host, root is then an ordinary user.
    """
    ranges = [tuple(map(int, line.split())) for line in table.splitlines()]
    if any(first <= NOBODY < first + count for first, _, count in ranges):
        return NOBODY
    return max((first + count - 1 for first, _, count in ranges), default=0) or None


def _drop_root(proc: int) -> None:
    def read(name: str) -> str:
        with open(os.open(f"self/{name}", os.O_RDONLY, dir_fd=proc)) as file:
            return file.read()

    with _step(
        "root may not become another user here: run as an ordinary user, or grant CAP_SETUID and CAP_SETGID"
    ):
        if read("setgroups").strip() == "allow":
            os.setgroups([])
        if (gid := spare_id(read("gid_map"))) is not None:
            os.setresgid(gid, gid, gid)
        if (uid := spare_id(read("uid_map"))) is not None:
            os.setresuid(uid, uid, uid)
    set_dumpable = 4  # changing ids clears this flag, and with it the right to write our own uid_map
    _check(_libc.prctl(set_dumpable, 1, 0, 0, 0), "prctl: dumpable")


def _set_limit(what: str, which: int, soft: int, hard: int) -> None:
    try:
        resource.setrlimit(which, (soft, hard))
    except (ValueError, OSError) as error:
        if sys.platform == "linux":  # limits are best effort on other systems
            raise OSError(errno.EPERM, f"{what}: {error}") from None


def _wait_as_shell_of(child: int) -> None:
    os.closerange(0, 1 << 16)  # above all the control socket, which only the zygote may hold open
    _, status = os.waitpid(child, 0)
    os._exit(1 if status else 0)


def _mount(source, target, kind, flags, options=None) -> None:
    encoded = [word.encode() if word is not None else None for word in (source, target, kind, options)]
    _check(
        _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]),
        f"mount {kind or source or target}",
    )


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{what}: {error.strerror}") from None


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
