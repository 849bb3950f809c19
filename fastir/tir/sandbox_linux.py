"""Linux isolation primitives for the sandbox: namespaces, a read-only root, capabilities, seccomp.

Called only inside the zygote and its children (see ``sandbox_child``), which are single-threaded and were started by a
clean exec. Everything goes through ctypes because the standard library offers these calls late (3.12) or not at all.
Every function raises ``OSError`` with the failing call in its message.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import signal
import struct
from collections.abc import Callable
from functools import partial

CLONE_NEWNS = 0x00020000
CLONE_NEWCGROUP = 0x02000000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
_ALL_NAMESPACES = (
    CLONE_NEWNS | CLONE_NEWCGROUP | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET
)
PRIVATE_NAMESPACES = CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | CLONE_NEWCGROUP  # by unshare
_CLONE_VM = 0x00000100

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_CAPABILITY_VERSION_3 = 0x20080522

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_KEEPCAPS = 8
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

UNPRIVILEGED_ID = 65534  # the kernel's overflow id, "nobody": what the zygote becomes when started by root

_libc = ctypes.CDLL(None, use_errno=True)
_fork = ctypes.PyDLL(None, use_errno=True).fork  # keeps the interpreter lock
_MACHINE = platform.machine()


def _check(result: int, call: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result


def unshare(flags: int) -> None:
    """Move this process into new namespaces."""
    _check(_libc.unshare(ctypes.c_int(flags)), f"unshare({flags:#x})")


def setns(fd: int, flags: int) -> None:
    """Enter the namespaces ``flags`` of the process or namespace that ``fd`` refers to."""
    _check(_libc.setns(fd, ctypes.c_int(flags)), f"setns({flags:#x})")


def fork() -> int:
    """Fork without what Python does around ``os.fork``: that mends locks and state that other threads may have held.

    For a process with one thread, which has nothing to mend. Each object that is looked at after a fork costs a copy of
    its page. Functions given to ``os.register_at_fork`` are not called.
    """
    return _check(_fork(), "fork")


def start_init(stack: ctypes.Array[ctypes.c_char]) -> int:
    """Start a process that sleeps until it is killed, as pid 1 of a new pid namespace; returns its pid.

    It shares this process's memory (nothing is copied: far cheaper than a fork), runs libc's ``pause`` on ``stack``,
    and keeps copies of the descriptors that are open now. If this process ignores SIGCHLD, so does the new one, and the
    kernel reaps the orphans that come to it. It must have ended before ``stack`` is used again.
    """
    top = (ctypes.addressof(stack) + len(stack)) & ~15
    flags = CLONE_NEWPID | _CLONE_VM | signal.SIGCHLD
    pause = ctypes.cast(_libc.pause, ctypes.c_void_p)
    return _check(_libc.clone(pause, ctypes.c_void_p(top), ctypes.c_int(flags), None), "clone(CLONE_NEWPID)")


def prctl(option: int, value: int) -> None:
    """``prctl(2)`` with one integer argument."""
    arguments = (ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    _check(_libc.prctl(option, *arguments), f"prctl({option})")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """``mount(2)``."""
    result = _libc.mount(
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )
    _check(result, f"mount({kind or source} on {target})")


def limit_malloc_arenas() -> None:
    """Keep glibc from reserving 64 MB of address space for each thread, which RLIMIT_AS would count."""
    m_arena_max = -8
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(m_arena_max, 1)


def wipe_arguments_and_environment() -> None:
    """Overwrite the memory behind /proc/self/cmdline and /proc/self/environ, which children inherit."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    # man proc_pid_stat: arg_start, arg_end, env_start, env_end are fields 48 to 51; field 3 is fields[0] here.
    arg_start, arg_end, env_start, env_end = (int(field) for field in fields[45:49])
    if env_end > env_start:
        ctypes.memset(env_start, 0, env_end - env_start)
    name = b"python"
    if arg_end - arg_start > len(name):
        ctypes.memset(arg_start, 0, arg_end - arg_start)
        ctypes.memmove(arg_start, name, len(name))


# ---------------------------------------------------------------------------------------------------------- identity


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def _try_map(pid: int, lines_of_ids: str, *, allow_setgroups: bool) -> bool:
    try:
        if not allow_setgroups:
            _write(f"/proc/{pid}/setgroups", "deny")
        _write(f"/proc/{pid}/gid_map", lines_of_ids)
        _write(f"/proc/{pid}/uid_map", lines_of_ids)
    except OSError:
        return False
    return True


def enter_user_namespace(flags: int) -> None:
    """Unshare a user namespace together with ``flags``.

    Root keeps id 0 (to read the Python installation wherever it lies while the new root is built) and additionally
    maps ``UNPRIVILEGED_ID``, to drop to afterwards: process limits do not bind the host's root. Writing two lines needs
    privileges in the *old* namespace, so a forked helper that stays there does it. Others map only themselves.
    """
    uid, gid = os.geteuid(), os.getegid()
    target = os.getpid()
    ready_read, ready_write = os.pipe()
    done_read, done_write = os.pipe()
    helper = os.fork() if uid == 0 else 0
    if uid == 0 and helper == 0:
        os.close(ready_write)
        mapped = bool(os.read(ready_read, 1)) and _try_map(
            target, f"0 0 1\n{UNPRIVILEGED_ID} {UNPRIVILEGED_ID} 1\n", allow_setgroups=True
        )
        os.write(done_write, b"1" if mapped else b"0")
        os._exit(0)
    try:
        unshare(CLONE_NEWUSER | flags)
        mapped = False
        if helper:
            os.write(ready_write, b"1")
            mapped = os.read(done_read, 1) == b"1"
    finally:
        for fd in (ready_read, ready_write, done_read, done_write):
            os.close(fd)
        if helper:
            os.waitpid(helper, 0)
    if not mapped:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/gid_map", f"{gid} {gid} 1\n")
        _write("/proc/self/uid_map", f"{uid} {uid} 1\n")


def become_unprivileged() -> bool:
    """Change root to ``UNPRIVILEGED_ID`` but keep the capabilities of the own user namespace. True if now not root."""
    if os.geteuid() != 0:
        return True
    try:
        prctl(PR_SET_KEEPCAPS, 1)
        os.setgroups([])
        os.setresgid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
        os.setresuid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    except OSError:
        return False
    _make_capabilities_effective()
    return True


def _make_capabilities_effective() -> None:
    header = struct.pack("<Ii", _CAPABILITY_VERSION_3, 0)  # 0: this process
    data = ctypes.create_string_buffer(24)
    _check(_libc.capget(header, data), "capget")
    _, low, _, _, high, _ = struct.unpack("<6I", data.raw)
    _check(_libc.capset(header, struct.pack("<6I", low, low, 0, high, high, 0)), "capset")


# ------------------------------------------------------------------------------------------------------------- workers


class WorkerCalls:
    """The system calls that isolate a worker, with arguments laid out by the zygote.

    A worker, being a fresh fork, pays for everything that it looks at or allocates with the copy of a page.
    """

    def __init__(self, tmp_bytes: int, *, has_proc: bool) -> None:
        flags = _MS_NOSUID | _MS_NODEV
        proc = partial(_libc.mount, b"proc", b"/proc", b"proc", ctypes.c_ulong(flags | _MS_NOEXEC))
        size = f"size={tmp_bytes},nr_inodes=16384,mode=1777".encode()
        tmp = partial(_libc.mount, b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(flags), size)
        self._enter: list[tuple[str, Callable[[], int], Callable[[], int]]] = []  # name, call, if that fails: another
        unshare_private = partial(_libc.unshare, ctypes.c_int(PRIVATE_NAMESPACES))
        self._enter.append(("unshare", unshare_private, unshare_private))
        if has_proc:  # the own pid namespace, and nothing of the host that ``subset=pid`` can hide
            self._enter.append(("mount(/proc)", partial(proc, b"subset=pid"), partial(proc, None)))
        self._enter.append(("mount(/tmp)", tmp, tmp))
        self._unshare_user = partial(_libc.unshare, ctypes.c_int(CLONE_NEWUSER))
        zeros = (ctypes.c_ulong(0),) * 3
        self._dumpable = partial(_libc.prctl, PR_SET_DUMPABLE, ctypes.c_ulong(1), *zeros)
        self._drop = partial(_libc.capset, struct.pack("<Ii", _CAPABILITY_VERSION_3, 0), bytes(24))
        program = seccomp_program()
        self._seccomp: Callable[[], int] | None = None
        if program is not None:
            buffer = ctypes.create_string_buffer(program, len(program))
            fprog = _SockFprog(len(program) // 8, ctypes.cast(buffer, ctypes.c_void_p).value)
            self._keep = buffer, fprog
            filter_mode = 2
            self._seccomp = partial(_libc.prctl, PR_SET_SECCOMP, filter_mode, ctypes.byref(fprog), *zeros[:2])

    def enter_namespaces(self) -> None:
        """New mount, network, ipc, uts and cgroup namespaces, with an own /proc and an empty /tmp."""
        for name, call, otherwise in self._enter:
            if call() < 0 and otherwise() < 0:
                _check(-1, name)
        for kept, prefix in _HIDDEN_BY_TMP.items():
            _bind(kept, prefix)
            _seal(prefix)

    def enter_user_namespace(self) -> None:
        """One more user namespace, so RLIMIT_NPROC counts this execution alone and its owner has no rights outside."""
        _check(self._unshare_user(), "unshare(CLONE_NEWUSER)")
        _check(self._dumpable(), "prctl(PR_SET_DUMPABLE)")  # otherwise our own /proc files belong to root

    def give_up_rights(self) -> None:
        """Give up all capabilities for good; load the seccomp filter, which needs no-new-privs."""
        _check(self._drop(), "capset")
        if self._seccomp:
            _check(self._seccomp(), "prctl(PR_SET_SECCOMP)")


def identity_files(uid: int, gid: int) -> list[tuple[str, bytes]]:
    """What a process writes to become ``uid`` and ``gid`` in its new user namespace: (path, text)."""
    return [
        ("/proc/self/setgroups", b"deny"),
        ("/proc/self/gid_map", f"{gid} {os.getegid()} 1\n".encode()),
        ("/proc/self/uid_map", f"{uid} {os.geteuid()} 1\n".encode()),
    ]


# -------------------------------------------------------------------------------------------------------- file system

_ETC = {
    "passwd": "root:x:0:0:root:/tmp:/bin/sh\nsandbox:x:1000:1000:sandbox:/tmp:/bin/sh\n",
    "group": "root:x:0:\nsandbox:x:1000:\n",
    "hosts": "127.0.0.1 localhost\n",
    "hostname": "sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
_ETC_BOUND = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime")
_SYSTEM = ("usr", "lib", "lib32", "lib64", "libx32", "bin", "sbin", "nix/store")
_HIDDEN_BY_TMP: dict[str, str] = {}  # where a prefix under /tmp is kept -> where it belongs
_DEVICES = ("null", "zero", "full", "random", "urandom")


def _bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "a"):
            pass
    mount(source, target, None, _MS_BIND | _MS_REC)


def _seal(target: str, *, devices: bool = False) -> None:
    """Make a mount and everything below it read-only, nosuid and (unless ``devices``) nodev."""
    attributes = 0x1 | 0x2 | (0 if devices else 0x4)  # MOUNT_ATTR_RDONLY, _NOSUID, _NODEV
    request = struct.pack("<4Q", attributes, 0, 0, 0)
    at_fdcwd, at_recursive, sys_mount_setattr = -100, 0x8000, 442
    result = _libc.syscall(
        ctypes.c_long(sys_mount_setattr),
        at_fdcwd,
        target.encode(),
        at_recursive,
        request,
        ctypes.c_size_t(len(request)),
    )
    _check(result, f"mount_setattr({target}) (needs Linux 5.12)")


def build_root(prefixes: list[tuple[str, str]]) -> bool:
    """Replace ``/`` by a read-only tree of ``prefixes`` and the system libraries; the host's tree becomes unreachable.

    ``prefixes`` are pairs (real path on the host, path inside).
    The caller owns a private mount namespace and is pid 1 of its pid namespace. Returns whether a /proc could be
    mounted: a container runtime that masks parts of /proc forbids it, and the sandbox then does without.
    """
    mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    os.chdir("/tmp")
    os.mkdir(".old", 0o700)
    pivot_root = {"x86_64": 155, "aarch64": 41}.get(_MACHINE)
    if pivot_root is None:
        raise OSError(errno.ENOSYS, f"pivot_root: no system call number known for {_MACHINE}")
    _check(_libc.syscall(ctypes.c_long(pivot_root), b".", b".old"), "pivot_root")
    os.chdir("/")
    for directory in ("etc", "dev", "proc", "tmp"):
        os.mkdir(directory)
    has_proc = True
    try:
        mount("proc", "/proc", "proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
        has_proc = False

    for name in _SYSTEM:
        source = f"/.old/{name}"
        if os.path.islink(source):  # merged /usr: /lib -> usr/lib
            os.symlink(os.readlink(source), f"/{name}")
        elif os.path.isdir(source):
            _bind(source, f"/{name}")
            _seal(f"/{name}")
    for number, (source, prefix) in enumerate(sorted(prefixes, key=lambda pair: pair[1])):  # parents before children
        if not os.path.exists(f"{prefix}/.") and os.path.isdir(f"/.old{source}"):
            _bind(f"/.old{source}", prefix)
            _seal(prefix)
            if prefix.startswith("/tmp/"):  # each execution's own /tmp will cover it: keep a second way in
                kept = f"/.prefix/{number}"
                _bind(f"/.old{source}", kept)
                _seal(kept)
                _HIDDEN_BY_TMP[kept] = prefix
    for name in _ETC_BOUND:
        source = f"/.old/etc/{name}"
        if os.path.islink(source):
            os.symlink(os.readlink(source), f"/etc/{name}")
        elif os.path.exists(source):
            _bind(source, f"/etc/{name}")
            _seal(f"/etc/{name}")
    for name, text in _ETC.items():
        _write(f"/etc/{name}", text)
    for name in _DEVICES:
        _bind(f"/.old/dev/{name}", f"/dev/{name}")
        _seal(f"/dev/{name}", devices=True)
    os.symlink("/tmp", "/dev/shm")  # POSIX semaphores and shared memory count against the size of /tmp
    if has_proc:
        os.symlink("/proc/self/fd", "/dev/fd")
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            os.symlink(f"/proc/self/fd/{number}", f"/dev/{name}")
    _check(_libc.umount2(b"/.old", _MNT_DETACH), "umount2(/.old)")
    os.rmdir("/.old")
    mount("none", "/", None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    return has_proc


def collapse_to_huge_pages() -> None:
    """Back this process's heap by huge pages where possible: forking then copies a tenth of the page tables."""
    madv_collapse, huge = 25, 2 << 20
    with open("/proc/self/maps") as file:
        lines = file.read().splitlines()
    for line in lines:
        fields = line.split()
        start, end = (int(address, 16) for address in fields[0].split("-"))
        start, end = -(-start // huge) * huge, end // huge * huge
        if fields[1] == "rw-p" and (len(fields) < 6 or fields[5] == "[heap]") and end > start:
            _libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), madv_collapse)  # only ever a speed-up


# ------------------------------------------------------------------------------------------------------------ seccomp

# Numbers for (x86_64, aarch64). These calls reach for other processes, kernel objects outside every limit, or large
# attack surface; none is needed by Python, numpy or sympy.
_DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "mount": (165, 40), "umount2": (166, 39),
    "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429),
    "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "open_tree_attr": (467, 467), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "unshare": (272, 97), "setns": (308, 268), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "fanotify_init": (300, 262), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "move_pages": (279, 239), "migrate_pages": (256, 238), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294), "syslog": (103, 116),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "vhangup": (153, 58), "personality": (135, 92),
}  # fmt: skip
_CLONE, _CLONE3, _PRLIMIT64, _SOCKET = (56, 220), (435, 435), (302, 261), (41, 198)
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


class _SockFprog(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def seccomp_program() -> bytes | None:
    """A classic BPF filter that refuses ``_DENIED``, new namespaces, and every socket family but AF_UNIX.

    Returns None on machines whose system call numbers are not listed here.
    """
    if _MACHINE not in _AUDIT_ARCH:
        return None
    column = ("x86_64", "aarch64").index(_MACHINE)
    load, jump_equal, jump_ge, jump_set, ret = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    program: list[tuple[int, int, int, int]] = []  # (code, jump if true, jump if false, constant)

    def refuse(code: int) -> tuple[int, int, int, int]:
        return (ret, 0, 0, 0x00050000 | code)

    program += [(load, 0, 0, 4), (jump_equal, 1, 0, _AUDIT_ARCH[_MACHINE]), (ret, 0, 0, kill), (load, 0, 0, 0)]
    if _MACHINE == "x86_64":  # the x32 numbering would bypass the list
        program += [(jump_ge, 0, 1, 0x40000000), refuse(errno.ENOSYS)]
    # clone3 hides its flags behind a pointer; ENOSYS makes glibc fall back to clone.
    program += [(jump_equal, 0, 1, _CLONE3[column]), refuse(errno.ENOSYS)]
    first_argument = (load, 0, 0, 16)
    program += [
        (jump_equal, 0, 4, _CLONE[column]), first_argument, (jump_set, 0, 1, _ALL_NAMESPACES),
        refuse(errno.EPERM), (ret, 0, 0, allow),
        (jump_equal, 0, 4, _PRLIMIT64[column]), first_argument, (jump_equal, 1, 0, 0),
        refuse(errno.EPERM), (ret, 0, 0, allow),
        (jump_equal, 0, 4, _SOCKET[column]), first_argument, (jump_equal, 1, 0, 1),
        refuse(errno.EACCES), (ret, 0, 0, allow),
    ]  # fmt: skip

    def search(numbers: list[int]) -> list[tuple[int, int, int, int]]:
        """By halves: the kernel runs a new filter once for every call number, to learn which it always allows."""
        if len(numbers) > 3:
            half = len(numbers) // 2
            below = search(numbers[:half])
            return [(jump_ge, len(below), 0, numbers[half]), *below, *search(numbers[half:])]
        tests = [(jump_equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
        return [*tests, (ret, 0, 0, allow), refuse(errno.EPERM)]

    program += search(sorted(numbers[column] for numbers in _DENIED.values()))
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in program)
