"""Attempts on the file system: the host's files, the runtime's, devices, and files that stay."""

from hostile import Attack, expression

_COMMANDS = {
    "F_GETLK": "others' locks on what it may read",
    "F_SETLK": "a lock for others to see",
    "F_SETLKW": "a lock, waiting",
    "F_OFD_GETLK": "others' locks, newer",
    "F_OFD_SETLK": "a lock, newer",
    "F_SETOWN": "signals to a process of the host",
    "F_SETSIG": "a signal of its choice",
    "F_SETLEASE": "word of who opens a file",
    "F_NOTIFY": "word of what happens in a directory",
    "F_SETPIPE_SZ": "the kernel's memory, in pipes",
}
_NUMBERS = {
    **{"F_GETLK": 5, "F_SETLK": 6, "F_SETLKW": 7, "F_OFD_GETLK": 36, "F_OFD_SETLK": 37, "F_SETOWN": 8},
    **{"F_SETSIG": 10, "F_SETLEASE": 1024, "F_NOTIFY": 1026, "F_SETPIPE_SZ": 1031},
}

ATTACKS = [
    *(
        expression(f"fcntl {name}", tries, f"blocked(raw, facts['nr']['fcntl'], 0, {_NUMBERS[name]}, 0)")
        for name, tries in _COMMANDS.items()
    ),
    expression(
        "lock a library",
        "a word for other programs, on a file that all have open",
        "refused(__import__('fcntl').lockf, open(os.__file__), 1)",  # LOCK_SH
    ),
    expression(
        "own a pipe",
        "a signal to the host whenever something is written",
        "refused(__import__('fcntl').fcntl, os.pipe()[0], 8, facts['host'])",
    ),
    expression("read a canary", "the host's files", "blocked(open, facts['canary'])"),
    expression("read accounts", "/etc/passwd", "blocked(open, '/etc/passwd')"),
    expression("climb", "a path of dots", "blocked(open, '../' * 20 + facts['canary'])"),
    expression(
        "write outside", "a file in a world-writable directory", "blocked(open, facts['drop'] + '/x', 'w')"
    ),
    expression("write at the root", "a directory of its own in /", "blocked(os.mkdir, '/evil')"),
    expression("change the library", "code that other programs run", "blocked(open, os.__file__, 'a')"),
    expression("open up the library", "its permissions", "blocked(os.chmod, os.__file__, 0o777)"),
    expression("age the library", "its time stamps", "blocked(os.utime, os.__file__, (0, 0))"),
    expression(
        "label the library", "extended attributes", "blocked(os.setxattr, os.__file__, 'user.x', b'x')"
    ),
    expression(
        "second name for the library",
        "a second name in its own directory",
        "blocked(os.link, os.__file__, 'x')",
    ),
    expression("remove the library", "a standard module", "blocked(os.unlink, os.__file__)"),
    expression(
        "replace a device",
        "/dev/null by a file of its own",
        "blocked(os.replace, os.open('x', 65) and 'x', '/dev/null')",
    ),
    expression("mount", "a file system", "blocked(raw, facts['nr']['mount'], b'x', b'/box', b'tmpfs', 0, 0)"),
    expression(
        "remount", "the library, to write it", "blocked(raw, facts['nr']['mount'], 0, b'/', 0, 4128, 0)"
    ),
    expression(
        "unmount", "what hides installed packages", "blocked(raw, facts['nr']['umount2'], b'/box', 2)"
    ),
    expression("pivot", "another root", "blocked(raw, facts['nr']['pivot_root'], b'.', b'.')"),
    expression(
        "move a mount", "with the newer interface", "blocked(raw, facts['nr']['open_tree'], -100, b'/', 1)"
    ),
    expression("chroot", "a root inside its root, to climb from", "blocked(os.chroot, '.')"),
    expression("handles", "a file by handle", "blocked(raw, facts['nr']['open_by_handle_at'], 0, 0, 0)"),
    expression("make a disk", "a device node", "blocked(os.mknod, 'd', 0o60600, os.makedev(254, 0))"),
    expression("own processes", "/proc", "blocked(os.listdir, '/proc')"),
    expression(
        "host's environment", "a process's variables", "blocked(open, f'/proc/{facts[\"host\"]}/environ')"
    ),
    expression("victim's arguments", "a command line", "blocked(open, f'/proc/{facts[\"victim\"]}/cmdline')"),
    expression("host's memory", "/proc/PID/mem", "blocked(open, f'/proc/{facts[\"host\"]}/mem', 'rb')"),
    expression("own memory map", "where the harness lies", "blocked(open, '/proc/self/maps')"),
    expression("kernel settings", "/sys", "blocked(os.listdir, '/sys')"),
    expression("control groups", "to lift limits", "blocked(os.listdir, '/sys/fs/cgroup')"),
    expression(
        "lock the library",
        "a lock that others would wait for",
        "blocked(__import__('fcntl').flock, os.open(os.__file__, 0), 2)",
    ),
    expression("watch the library", "what siblings import", "blocked(raw, facts['nr']['inotify_init1'], 0)"),
    expression(
        "fill the disk, sparse", "one huge file", "blocked(os.truncate, os.open('x', 65) and 'x', 1 << 40)"
    ),
    Attack(
        "what there is",
        "anything at the root but the library, devices and its own directory",
        """
def attack(facts):
    runtime = os.__file__.split("/")[1]
    return sorted(set(os.listdir("/")) - {"box", "dev", "tmp", runtime})
""",
        answer=[],
    ),
    Attack(
        "devices",
        "disks, memory, terminals, the kernel's log",
        """
def attack(facts):
    names = ("vda", "sda", "mem", "kmsg", "tty", "console", "ptmx", "fuse", "kvm", "net/tun", "nvidia0")
    return sorted({blocked(os.stat, "/dev/" + name) for name in names})
""",
        answer=["blocked"],
    ),
    Attack(
        "through a link",
        "a symbolic link out of its directory",
        """
def attack(facts):
    os.symlink(facts["canary"], "link")
    os.symlink("/../../etc", "etc")
    return {blocked(open, "link"), blocked(open, "link", "w"), blocked(open, "etc/passwd")}
""",
        answer={"blocked"},
    ),
    Attack(
        "inherited files",
        "open descriptors, directories outside above all",
        """
def attack(facts):
    import stat
    kinds = []
    for fd in range(4096):
        try:
            mode = os.fstat(fd).st_mode
        except OSError:
            continue
        if stat.S_ISDIR(mode) or stat.S_ISSOCK(mode) or fd > 3:
            kinds.append((fd, mode))
    return kinds
""",
        answer=[],
    ),
    Attack(
        "installed packages",
        "code beyond the standard library",
        """
def attack(facts):
    found = []
    for name in ("numpy", "jax", "pip", "setuptools", "marl_jax", "site_packages"):
        try:
            found.append(__import__(name))
        except ImportError:
            pass
    return len(found)
""",
        answer=0,
    ),
    Attack(
        "fill the disk",
        "all that its directory takes",
        """
def attack(facts):
    total = 0
    try:
        for n in range(1000):
            with open(f"x{n}", "wb", 0) as file:
                total += file.write(b"x" * (1 << 20))
    except OSError:
        return total <= 64 << 20
    return "DONE"
""",
        answer=True,
    ),
    Attack(
        "many files",
        "inodes without end",
        """
def attack(facts):
    try:
        for n in range(100_000):
            os.close(os.open(f"x{n}", os.O_CREAT))
    except OSError:
        return n < 5000
    return "DONE"
""",
        answer=True,
    ),
]
