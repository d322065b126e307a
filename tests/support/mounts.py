"""File systems of many kinds, mounted for a test where the machine can."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from support.processes import free_port

MOUNT_TIMEOUT_S = 20


class NoMount(Exception):
    """This machine cannot mount a file system of this kind; says why."""


def run(*command: object) -> None:
    """Runs a command.

    Raises:
        NoMount: it is not installed, or fails.
    """
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        raise NoMount(f"{words[0]} is not installed")
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if done.returncode:
        text = (done.stderr or done.stdout).strip().splitlines()
        raise NoMount(f"{words[0]}: {text[-1] if text else done.returncode}")


def state(number: int) -> dict[str, object]:
    """What is saved there."""
    rng = np.random.default_rng(7)
    frozen = rng.standard_normal(20_000)
    return {"frozen": frozen, "w": np.arange(30_000.0) + number, "step": number}


@contextmanager
def mounted(kind: str, work: Path, endpoint: str) -> Iterator[Path]:
    """A folder in a new file system.

    Arguments:
        kind: one of `KINDS`.
        work: an empty folder for what it needs.
        endpoint: of an S3 server with the bucket `bucket`.

    Raises:
        NoMount: this machine cannot mount it.
    """
    if os.geteuid():
        raise NoMount("to mount needs root")
    folder = work / "mnt"
    folder.mkdir()
    with ExitStack() as stack:
        stack.callback(_unmount, folder)
        KINDS[kind](work, folder, endpoint, stack)
        if not os.path.ismount(folder):
            raise NoMount(f"{folder} is not mounted")
        stack.callback(_unmount, folder)  # before the processes that it needs end
        yield folder


def _unmount(folder: Path) -> None:
    """Unmounts, unless the file system's own process does so as it ends."""
    if not os.path.ismount(folder):
        return
    try:
        run("umount", "--lazy", folder)
    except NoMount:
        if os.path.ismount(folder):
            raise


def _image(mkfs: str, megabytes: int, *mount: str) -> Mount:
    """A file system in a sparse file."""

    def mount_image(work: Path, folder: Path, endpoint: str, stack: ExitStack) -> None:
        image = work / "image"
        with open(image, "wb") as file:
            file.truncate(megabytes << 20)
        run(*mkfs.split(), image)
        run(*(mount or ("mount", "-o", "loop")), image, folder)

    return mount_image


def _exfat(work: Path, folder: Path, endpoint: str, stack: ExitStack) -> None:
    """By FUSE, which takes a block device."""
    image = work / "image"
    with open(image, "wb") as file:
        file.truncate(128 << 20)
    run("mkfs.exfat", image)
    command = ["losetup", "--find", "--show", str(image)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if found.returncode:
        raise NoMount(found.stderr.strip())
    device = found.stdout.strip()
    stack.callback(subprocess.run, ["losetup", "--detach", device], timeout=60)
    stack.callback(_unmount, folder)
    run("mount.exfat-fuse", device, folder)


def _tmpfs(work: Path, folder: Path, endpoint: str, stack: ExitStack) -> None:
    run("mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", folder)


def _overlay(work: Path, folder: Path, endpoint: str, stack: ExitStack) -> None:
    for name in ("lower", "upper", "work"):
        (work / name).mkdir()
    layers = f"lowerdir={work}/lower,upperdir={work}/upper,workdir={work}/work"
    run("mount", "-t", "overlay", "overlay", "-o", layers, folder)


def _bindfs(work: Path, folder: Path, endpoint: str, stack: ExitStack) -> None:
    (work / "source").mkdir()
    run("bindfs", work / "source", folder)


def _mergerfs(work: Path, folder: Path, endpoint: str, stack: ExitStack) -> None:
    for name in ("one", "two"):
        (work / name).mkdir()
    run("mergerfs", f"{work}/one:{work}/two", folder)


def _sshfs(work: Path, folder: Path, endpoint: str, stack: ExitStack) -> None:
    """Over sftp-server itself, which is what sshd starts."""
    (work / "source").mkdir()
    server = "/usr/lib/openssh/sftp-server"
    if not os.path.exists(server):
        raise NoMount("no sftp-server")
    port = free_port()
    _started(stack, "socat", f"TCP-LISTEN:{port},bind=127.0.0.1,reuseaddr", f"EXEC:{server}")
    _try(lambda: run("sshfs", "-o", f"directport={port}", f"127.0.0.1:{work}/source", folder))


def _rclone(*options: str) -> Mount:
    def mount(work: Path, folder: Path, endpoint: str, stack: ExitStack) -> None:
        (work / "source").mkdir()
        (work / "config").touch()
        options_of_all = ("--config", work / "config", "--dir-cache-time", "1s")
        command = ("rclone", "mount", f"{work}/source", folder, *options_of_all, *options)
        _started(stack, *command)
        _wait_mounted(folder)

    return mount


def _s3fs(work: Path, folder: Path, endpoint: str, stack: ExitStack) -> None:
    (work / "keys").write_text("anyone:anything")
    (work / "keys").chmod(0o600)
    options = f"passwd_file={work}/keys,url={endpoint},use_path_request_style"
    run("s3fs", "bucket", folder, "-o", options)
    _wait_mounted(folder)


def _started(stack: ExitStack, *command: object) -> None:
    words = [str(word) for word in command]
    if shutil.which(words[0]) is None:
        raise NoMount(f"{words[0]} is not installed")
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(words, stdin=quiet, stdout=quiet, stderr=quiet)

    def end() -> None:
        process.terminate()
        process.wait(60)

    stack.callback(end)


def _try(act: Callable[[], None]) -> None:
    """Tries until a server listens."""
    deadline = time.monotonic() + MOUNT_TIMEOUT_S
    while True:
        try:
            return act()
        except NoMount:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _wait_mounted(folder: Path) -> None:
    deadline = time.monotonic() + MOUNT_TIMEOUT_S
    while not os.path.ismount(folder):
        if time.monotonic() > deadline:
            raise NoMount(f"{folder} was not mounted in time")
        time.sleep(0.05)


Mount = Callable[[Path, Path, str, ExitStack], None]
KINDS: dict[str, Mount] = {
    "ext4": _image("mkfs.ext4 -q", 128),
    "xfs": _image("mkfs.xfs -q", 320),
    "btrfs": _image("mkfs.btrfs -q", 256),
    "exfat": _exfat,
    "ntfs": _image("mkfs.ntfs -q -F", 128, "ntfs-3g"),
    "tmpfs": _tmpfs,
    "overlay": _overlay,
    "bindfs": _bindfs,
    "mergerfs": _mergerfs,
    "sshfs": _sshfs,
    "rclone": _rclone("--vfs-cache-mode", "off"),
    "rclone-writes": _rclone("--vfs-cache-mode", "writes", "--vfs-write-back", "0s"),
    "s3fs": _s3fs,
}
