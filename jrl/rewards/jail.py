"""Runs programs that nobody has read: `python -I -S jail.py OPTIONS`, a script that needs nothing but Python on Linux.

OPTIONS is JSON: memory_bytes, file_bytes (of all files), files, processes, output_bytes, weak (whether to go on without
namespaces). The first line of stdout is {"weak": why there are no namespaces, "" where there are} or {"refused": why}. Then
each line of stdin, {"source": Python, "stdin": text, "wall_s": seconds}, is answered by one line {"ended": how, "code": exit
code or 128 + signal, "output": what it wrote to stdout}; how is exit, wall, memory, processes or output.

    this process    without network, in a root of its own: Python and the system's libraries, read only
      watcher       one for each program: it enforces wall time, output, and memory and processes of all its descendants
        init        the first process of a new PID namespace; when it ends, or its watcher does, the kernel ends all in it
          program   unprivileged, no capabilities, no new ones, system calls filtered, resource limits, a /tmp of its own

The program's user is "nobody" where this runs as root, and otherwise the one who runs it, in a user namespace either way.
Without namespaces only the limits, the filter and the watcher are left: the program can then read what its user can read and use
the network, its processes are limited together with all of its user's, and where there is no /proc either (macOS, never tried) it
can outlive its time.
"""

import contextlib
import ctypes
import errno
import json
import os
import platform
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

PYTHON = os.path.realpath(sys.executable)
OPEN_FILES = 64
POLL_S = 0.02
INSIDE_UID, NOBODY = 1000, 65534
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID, _CLONE_NEWNET = 1 << 17, 1 << 27, 1 << 28, 1 << 29, 1 << 30
_CLONE_NEW_ANY = 0x7E020000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 1, 1 << 2, 1 << 12, 1 << 14, 1 << 18
_MNT_DETACH = 2
_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _ATTR_SEALED = 442, -100, 0x8000, 0x1 | 0x2 | 0x4  # read only, no suid, no devices
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38

# System calls that a program has no use for and that reach what the limits do not count (memory without a file or a mapping,
# keys of the session, other processes) or much of the kernel. Numbers are those of the kernel's tables of x86-64 and AArch64.
_DENIED = {
    "x86_64": {
        "add_key": 248, "bpf": 321, "io_uring_enter": 426, "io_uring_register": 427, "io_uring_setup": 425, "keyctl": 250,
        "memfd_create": 319, "memfd_secret": 447, "mount": 165, "mq_open": 240, "msgget": 68, "open_by_handle_at": 304,
        "perf_event_open": 298, "pidfd_getfd": 438, "process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101,
        "request_key": 249, "semget": 64, "setns": 308, "shmget": 29, "unshare": 272, "userfaultfd": 323,
    },
    "aarch64": {
        "add_key": 217, "bpf": 280, "io_uring_enter": 426, "io_uring_register": 427, "io_uring_setup": 425, "keyctl": 219,
        "memfd_create": 279, "memfd_secret": 447, "mount": 40, "mq_open": 180, "msgget": 186, "open_by_handle_at": 265,
        "perf_event_open": 241, "pidfd_getfd": 438, "process_vm_readv": 270, "process_vm_writev": 271, "ptrace": 117,
        "request_key": 218, "semget": 190, "setns": 268, "shmget": 194, "unshare": 97, "userfaultfd": 282,
    },
}  # fmt: skip
_ARCH = {"x86_64": (0xC000003E, 56), "aarch64": (0xC00000B7, 220)}  # the kernel's name of it, and the number of clone
_CLONE3 = 435

_libc = ctypes.CDLL(None, use_errno=True)


def _call(function: str, *arguments: Any) -> int:
    result = getattr(_libc, function)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{function}: {os.strerror(number)}")
    return result


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode() or None, ctypes.c_ulong(flags), data.encode() or None)


def _seal(path: str, recursive: bool) -> None:
    """Makes a mount read only; what it has of set-user-id bits and devices has no effect."""
    attributes = struct.pack("QQQQ", _ATTR_SEALED, 0, 0, 0)
    flags = _AT_RECURSIVE if recursive else 0
    _call("syscall", _SYS_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, ctypes.c_size_t(len(attributes)))


# The room ------------------------------------------------------------------------------------------------------------------


def enter() -> int:
    """Leaves the network and all files but Python's behind, and root's rights; returns the former /proc, open.

    Raises:
      OSError: the kernel does not allow it here.
    """
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    root = os.geteuid() == 0
    if root:
        os.setgroups([])
        _call("unshare", _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC)
    else:
        _new_user(proc, _CLONE_NEWNS | _CLONE_NEWNET | _CLONE_NEWIPC)
    _mount("none", "/", flags=_MS_REC | _MS_PRIVATE)
    room = tempfile.mkdtemp(prefix="jrl-sandbox-")
    try:
        _mount("tmpfs", room, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
        _furnish(room)
        os.chdir(room)
        _call("pivot_root", b".", b"old")
    except BaseException:
        _call("umount2", room.encode(), _MNT_DETACH)
        os.rmdir(room)
        raise
    os.rmdir(f"/old{room}")
    os.chdir("/")
    _call("umount2", b"/old", _MNT_DETACH)
    os.rmdir("/old")
    _seal("/", recursive=False)
    if root:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        _call("prctl", _PR_SET_DUMPABLE, 1, 0, 0, 0)  # lost with the change of user; without it /proc/self is root's
    return proc


def _furnish(room: str) -> None:
    for name in ("old", "tmp", "dev", "dev/shm", "etc"):
        os.mkdir(f"{room}/{name}")
    for name in ("lib", "lib32", "lib64"):
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{room}/{name}")
    files = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom", "/etc/ld.so.cache"]
    folders = ["/usr", "/lib", "/lib32", "/lib64", os.path.realpath(sys.base_prefix)]
    for path in filter(os.path.exists, files + folders):
        there = room + path
        if os.path.lexists(there):  # a link, or a part of what is there already
            continue
        os.makedirs(there if path in folders else os.path.dirname(there), exist_ok=True)
        if path in files:
            with open(there, "x"):
                pass
        _mount(path, there, flags=_MS_BIND | _MS_REC)
        if not path.startswith("/dev/"):  # no devices would mean no /dev/null
            _seal(there, recursive=True)


def _new_user(proc: int, others: int) -> None:
    """A user namespace in which this user is `INSIDE_UID`, with all capabilities there, and other namespaces that it owns."""
    uid, gid = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER | others)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{INSIDE_UID} {uid} 1"), ("gid_map", f"{INSIDE_UID} {gid} 1")):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)


# One program ---------------------------------------------------------------------------------------------------------------


def watch(request: dict, options: dict, proc: int | None, weak: bool) -> dict:
    """Runs one program and everything that it starts, to the end of all of them."""
    watched = os.getppid()
    if weak:
        directory = tempfile.mkdtemp(prefix="jrl-sandbox-")
        if sys.platform == "linux":
            _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    else:
        assert proc is not None
        _new_user(proc, _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC)
        _die_with(watched)
        size = options["file_bytes"] + len(request["source"]) + len(request["stdin"])
        _mount("tmpfs", "/tmp", "tmpfs", _MS_NOSUID | _MS_NODEV, f"size={size},nr_inodes={options['files'] + 3},mode=700")
        _mount("/tmp", "/dev/shm", flags=_MS_BIND)
        directory = "/tmp"
    try:
        with open(f"{directory}/stdin", "wb") as file:
            file.write(request["stdin"].encode())
        with open(f"{directory}/program.py", "w", encoding="utf-8") as file:
            file.write(request["source"])
        stdin = os.open(f"{directory}/stdin", os.O_RDONLY)
        os.unlink(f"{directory}/stdin")
        reading, writing = os.pipe()
        init = _fork(lambda: _init(lambda: _become(directory, stdin, writing, options, weak), weak))
        os.close(writing)
        result = {"code": -1}
        try:
            result = _until_it_ends(init, reading, request["wall_s"], options, proc)
        finally:
            if result["code"] < 0:  # otherwise its number may be another's by now
                (os.killpg if weak else os.kill)(init, signal.SIGKILL)
                os.waitpid(init, 0)
            if weak and proc is not None:
                _end_descendants(proc)
        return result
    finally:
        if weak:
            shutil.rmtree(directory, ignore_errors=True)


def _fork(do: Callable[[], None]) -> int:
    """The number of a process that does it, and ends when this one does."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        _die_with(os.getppid())
        do()
        os._exit(0)
    except BaseException as error:
        os.write(2, f"jail: {error}\n".encode())
        os._exit(125)


def _die_with(parent: int) -> None:
    """Ends this process with its parent; to be said again after each change of user or capabilities, which revokes it."""
    if sys.platform == "linux":
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(125)


def _init(do: Callable[[], None], weak: bool) -> NoReturn:
    if weak:
        os.setpgid(0, 0)
    program = _fork(do)
    os.closerange(3, 1024)
    while True:
        pid, status = os.wait()  # of orphans too
        if pid == program:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


def _until_it_ends(init: int, reading: int, wall_s: float, options: dict, proc: int | None) -> dict:
    output, ended, code = b"", "", -1
    until = time.monotonic() + wall_s
    is_open = True
    while not ended:
        if is_open and select.select([reading], [], [], POLL_S)[0]:
            piece = os.read(reading, 1 << 16)
            output, is_open = output + piece, bool(piece)
        elif not is_open:
            time.sleep(POLL_S / 10)
        pid, status = os.waitpid(init, os.WNOHANG)
        if pid:
            code, ended = os.waitstatus_to_exitcode(status), "exit"
            while is_open and select.select([reading], [], [], 0)[0] and (piece := os.read(reading, 1 << 16)):
                output += piece  # what is left in the pipe, which is small
        elif time.monotonic() > until:
            ended = "wall"
        elif proc is not None:
            found = list(descendants(proc, init))
            if len(found) > options["processes"]:
                ended = "processes"
            elif sum(_resident_bytes(proc, pid) for pid in found) > options["memory_bytes"]:
                ended = "memory"
        if len(output) > options["output_bytes"]:
            ended = "output"
    return {"ended": ended, "code": code, "output": output[: options["output_bytes"]].decode(errors="replace")}


def _end_descendants(proc: int) -> None:
    """Ends what has come down to this process, the reaper of all orphans below it; in a PID namespace the kernel has done so."""
    while left := list(descendants(proc, os.getpid())):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def descendants(proc: int, pid: int) -> Iterator[int]:
    """Of a process, itself not among them."""
    try:
        with open(os.open(f"{pid}/task/{pid}/children", os.O_RDONLY, dir_fd=proc)) as file:
            children = [int(child) for child in file.read().split()]
    except OSError:  # it has ended
        return
    for child in children:
        yield child
        yield from descendants(proc, child)


def _resident_bytes(proc: int, pid: int) -> int:
    try:
        with open(os.open(f"{pid}/statm", os.O_RDONLY, dir_fd=proc)) as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def _become(directory: str, stdin: int, stdout: int, options: dict, weak: bool) -> NoReturn:
    """This process becomes the program."""
    if not weak:  # there its group is how it is ended
        os.setsid()
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.closerange(3, 1024)
    if weak and os.geteuid() == 0:
        os.chown(directory, NOBODY, NOBODY)
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    os.chdir(directory)
    limits = {
        resource.RLIMIT_AS: options["memory_bytes"], resource.RLIMIT_FSIZE: options["file_bytes"], resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES, resource.RLIMIT_CPU: options["cpu_s"],
        resource.RLIMIT_NPROC: options["processes"] + 2,  # watcher and init count as well
    }  # fmt: skip
    for name, limit in limits.items():
        with contextlib.suppress(*(() if sys.platform == "linux" else (OSError, ValueError))):  # macOS does not have all
            resource.setrlimit(name, (limit, limit))
    _die_with(os.getppid())
    if sys.platform == "linux":
        _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        filter_system_calls()
    os.dup2(os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC), 2)
    os.execve(PYTHON, [PYTHON, "-I", "-S", "-B", "-X", "utf8", "program.py"], {})


def filter_system_calls() -> None:
    """Refuses `_DENIED` and new namespaces to this process and all that it starts.

    Raises:
      OSError: on a processor whose numbers are not known here.
    """
    machine = platform.machine()
    if machine not in _ARCH:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    arch, clone = _ARCH[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = (0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS)
    program: list[tuple[int, int, int, int]] = [  # (operation, instructions to skip if true, if false, operand)
        (load, 0, 0, 4), (equal, 1, 0, arch), (give, 0, 0, refuse),
        (load, 0, 0, 0), (at_least, 0, 1, 0x40000000), (give, 0, 0, refuse),  # x32 has numbers of its own
    ]  # fmt: skip
    for number in _DENIED[machine].values():
        program += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    program += [(equal, 0, 1, _CLONE3), (give, 0, 0, unknown)]  # its flags are out of a filter's reach: libc takes clone then
    program += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, _CLONE_NEW_ANY), (give, 0, 0, refuse)]
    program += [(give, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    _call("prctl", _PR_SET_SECCOMP, 2, ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(code))), 0, 0)


# The conversation ----------------------------------------------------------------------------------------------------------


def _hindrance() -> str:
    """Why there can be no namespaces; "" where there can. It is tried in another process, as half of it would be of no use."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    reading, writing = os.pipe()

    def attempt() -> None:
        try:
            _new_user(enter(), _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC)
        except OSError as error:
            os.write(writing, error.strerror.encode())

    pid = _fork(attempt)
    os.close(writing)
    with open(reading, "rb") as file:
        said = file.read().decode()
    return said if os.waitpid(pid, 0)[1] == 0 else said or "the attempt to make namespaces crashed"


def _serve(options: dict) -> None:
    parent = os.getppid()
    _die_with(parent)
    why = _hindrance()
    if why and not options["weak"]:
        return _answer({"refused": why})
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY) if why and os.path.isdir("/proc/self") else None if why else enter()
    _die_with(parent)
    _answer({"weak": why})
    for line in sys.stdin:
        request = json.loads(line)
        watcher = _fork(lambda request=request: _answer(watch(request, options, proc, bool(why))))  # type: ignore[misc]
        _, status = os.waitpid(watcher, 0)
        if status:
            _answer({"ended": "broken", "code": status, "output": ""})
    return None


def _answer(message: dict) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    _serve(json.loads(sys.argv[1]))
