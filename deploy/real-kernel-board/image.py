"""Make a board's disk, kernel modules, device tree and initial RAM disk from the distribution's material.

Standard library only. Needs root, for the owners of files; starting what is made here is `guest.py`'s work.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from material import Material

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import debian

HERE = Path(__file__).resolve().parent
# Who may log in, with the image's key; what sudo lets them do is in `guest/etc/sudoers.d`.
LOGINS = {"farm": 1001, "plain": 1002, "asked": 1003, "terminal": 1004}
# Sparse: two versions of the agent and a bundle take 1.5 GB.
DISK_BYTES = 3 << 30
# All of the kernel's modules are 290 MB; these and what they need are 10.
MODULES = (
    *("virtio_pci", "virtio_blk", "virtio_net", "virtio_rng", "ext4", "crc32c_generic", "autofs4", "configfs"),
    *("cpufreq_ondemand", "cpufreq_conservative", "cpufreq_powersave", "cpufreq_userspace", "governor_simpleondemand"),
    *("governor_userspace", "i2c-dev", "ina3221", "farm_ina3221x"),
    *("farm_board", "fuse", "loop", "softdog", "efivarfs"),
)
# Before the disk can be read.
_EARLY = ("virtio_pci", "virtio_blk", "crc32c_generic", "ext4")
_CROSS = "aarch64-linux-gnu-"
_TIMEOUT_S = 300.0
_INIT = """#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
for module in /modules/*; do /bin/busybox insmod "$module"; done
turns=0
while [ ! -b /dev/vda ] && [ $turns -lt 400 ]; do /bin/busybox usleep 50000; turns=$((turns + 1)); done
/bin/busybox mount -t ext4 -o rw,noatime /dev/vda /root || exec /bin/busybox sh
/bin/busybox mount --move /dev /root/dev
exec /bin/busybox switch_root /root /sbin/init
"""
_SYSTEM_PATH = {"PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"}


def make(board: str, material: Material, machine: list[str], folder: Path, scratch: Path) -> None:
    """Put `vmlinuz`, `initrd.gz`, `board.dtb`, `disk.qcow2` and `key` of a board into `folder`.

    `machine` is QEMU's command line that says which machine it is. Raises BuildError.
    """
    debian.say(f"making the image of {board}")
    shutil.copy(material.kernel, folder / "vmlinuz")
    _make_device_tree(board, machine, folder / "board.dtb", scratch)
    _build_modules(material, scratch / "module")
    root = scratch / "root"
    root.mkdir()
    unpack = ["tar", "-C", str(root), "-xpf", str(material.root), "--numeric-owner", "--exclude=./dev/*"]
    debian.run(unpack, "the root cannot be unpacked", _TIMEOUT_S)
    files = list(_install_modules(material, root))
    _make_key(folder / "key")
    _set_up(root, board, folder / "key", scratch)
    _make_initrd(root, files, folder / "initrd.gz", scratch / "initrd")
    raw = scratch / "disk"
    with raw.open("wb") as disk:
        disk.truncate(DISK_BYTES)
    format_disk = ["mke2fs", "-q", "-t", "ext4", "-F", "-L", "root", "-E", "lazy_itable_init=1,lazy_journal_init=1"]
    debian.run([*format_disk, "-d", str(root), str(raw)], "the disk cannot be made", _TIMEOUT_S)
    convert = ["qemu-img", "convert", "-O", "qcow2", str(raw), str(folder / "disk.qcow2")]
    debian.run(convert, "the disk cannot be converted", _TIMEOUT_S)


def _make_device_tree(board: str, machine: list[str], path: Path, scratch: Path) -> None:
    """The machine's own tree, as QEMU writes it, and what makes it this board."""
    binary, text = scratch / "machine.dtb", scratch / "board.dts"
    dump = [*machine]
    dump[dump.index("-machine") + 1] += f",dumpdtb={binary}"
    debian.run(dump, "QEMU does not write its device tree", _TIMEOUT_S)
    debian.run(["dtc", "-q", "-I", "dtb", "-O", "dts", "-o", str(text), str(binary)], "dtc", _TIMEOUT_S)
    text.write_text(text.read_text() + (HERE / "boards" / f"{board}.dtsi").read_text())
    failure = f"the device tree of {board} is wrong"
    debian.run(["dtc", "-q", "-I", "dts", "-O", "dtb", "-o", str(path), str(text)], failure, _TIMEOUT_S)


def _build_modules(material: Material, folder: Path) -> None:
    """Build ours and the sensor's driver for the kernel, and put them among its own modules."""
    version = material.kernel_version
    headers = material.headers / "usr/src" / f"linux-headers-{version}"
    # Debian's file names the place where the package would be installed.
    own = (headers / "Makefile").read_text()
    common = headers.parent / f"linux-headers-{version.removesuffix('-arm64')}-common"
    (headers / "Makefile").write_text(re.sub(r"include \S+", f"include {common}/Makefile", own))
    shutil.copytree(HERE / "module", folder)
    shutil.copy(material.driver, folder)
    make = ["make", "-C", str(headers), f"M={folder}", "ARCH=arm64", f"CROSS_COMPILE={_CROSS}", f"CC={_CROSS}gcc"]
    debian.run([*make, "modules"], "the kernel modules cannot be built", _TIMEOUT_S)
    place = material.modules / "lib/modules" / version / "updates"
    place.mkdir(exist_ok=True)
    for module in folder.glob("*.ko"):
        strip = [f"{_CROSS}strip", "-g", str(module), "-o", str(place / module.name)]
        debian.run(strip, "strip", _TIMEOUT_S)
    debian.run(["depmod", "-b", str(material.modules), version], "depmod", _TIMEOUT_S, _SYSTEM_PATH)


def _install_modules(material: Material, root: Path) -> Iterator[Path]:
    """Copy the modules and what they need into the root; return what the initial RAM disk loads, in order."""
    version, place = material.kernel_version, material.modules / "lib/modules"
    needed = {name: _find_needed(material, name) for name in MODULES}
    for path in {path for paths in needed.values() for path in paths}:
        target = root / "usr/lib/modules" / path.relative_to(place)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    for index in (place / version).glob("modules.builtin*"):
        shutil.copy(index, root / "usr/lib/modules" / version)
    shutil.copy(place / version / "modules.order", root / "usr/lib/modules" / version)
    debian.run(["depmod", "-b", str(root), version], "depmod", _TIMEOUT_S, _SYSTEM_PATH)
    yield from dict.fromkeys(path for name in _EARLY for path in needed[name])


def _find_needed(material: Material, module: str) -> list[Path]:
    """The files of a module and of what it needs, in the order of loading; none for what is built in."""
    show = ["modprobe", "-d", str(material.modules), "-S", material.kernel_version, "--show-depends", module]
    text = debian.run(show, f"the kernel has no {module}", _TIMEOUT_S, _SYSTEM_PATH)
    return [Path(line.split()[1]) for line in text.splitlines() if line.startswith("insmod ")]


def _make_key(path: Path) -> None:
    for place in (path, path.with_name("host_key")):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "real-kernel-board", "-f", str(place)]
        debian.run(make, "ssh-keygen", _TIMEOUT_S)


def _set_up(root: Path, board: str, key: Path, scratch: Path) -> None:
    """Names, logins, keys and services of the root."""
    for files in (HERE / "guest", HERE / "boards" / board):
        shutil.copytree(files, root, dirs_exist_ok=True, symlinks=True)
    for path in (root / "etc/sudoers.d").iterdir():
        path.chmod(0o440)
    _append(root / "etc/hosts", f"127.0.0.1 localhost {board}\n")
    (root / "etc/hostname").write_text(f"{board}\n")
    for name, number in LOGINS.items():
        _append(root / "etc/passwd", f"{name}:x:{number}:{number}::/home/{name}:/bin/bash\n")
        _append(root / "etc/group", f"{name}:x:{number}:\n")
        _append(root / "etc/shadow", f"{name}:!:20000:0:99999:7:::\n")
    for home, number in (("root", 0), *((f"home/{name}", number) for name, number in LOGINS.items())):
        folder = root / home / ".ssh"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copy(key.with_suffix(".pub"), folder / "authorized_keys")
        for path in (folder.parent, folder, folder / "authorized_keys"):
            os.chown(path, number, number)
    for path in (root / "etc/ssh").glob("ssh_host_*"):
        path.unlink()
    for name in ("host_key", "host_key.pub"):
        shutil.copy(key.with_name(name), root / "etc/ssh" / name.replace("host_key", "ssh_host_ed25519_key"))
    wanted = root / "etc/systemd/system/multi-user.target.wants"
    wanted.mkdir(parents=True, exist_ok=True)
    for unit in ("ssh.service", "systemd-networkd.service"):
        (wanted / unit).unlink(missing_ok=True)
        (wanted / unit).symlink_to(f"/lib/systemd/system/{unit}")
    # What a board that is thrown away within minutes need not do.
    timers = ("apt-daily", "apt-daily-upgrade", "dpkg-db-backup", "e2scrub_all", "fstrim")
    services = ("systemd-networkd-wait-online", "systemd-binfmt", "e2scrub_reap")
    names = [*(f"{timer}.timer" for timer in timers), *(f"{service}.service" for service in services)]
    for unit in (*names, "proc-sys-fs-binfmt_misc.automount"):
        path = root / "etc/systemd/system" / unit
        path.unlink(missing_ok=True)
        path.symlink_to("/dev/null")
    # The image keeps no package source and no proxy of this machine.
    for pattern in ("sources.list*", "sources.list.d/*", "apt.conf.d/99mmdebstrap"):
        for path in (root / "etc/apt").glob(pattern):
            if not path.is_dir():
                path.unlink()
    (root / "etc/machine-id").write_text("")


def _append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def _make_initrd(root: Path, modules: list[Path], path: Path, folder: Path) -> None:
    for name in ("bin", "dev", "root", "modules"):
        (folder / name).mkdir(parents=True)
    shutil.copy(root / "bin/busybox", folder / "bin")
    for number, module in enumerate(modules):
        shutil.copy(module, folder / "modules" / f"{number:02}-{module.name}")
    (folder / "init").write_text(_INIT)
    (folder / "init").chmod(0o755)
    pack = 'find . | cpio --quiet -o -H newc | gzip -1 >"$1"'
    debian.run(["sh", "-ec", pack, "sh", str(path)], "the initial RAM disk cannot be made", _TIMEOUT_S, folder=folder)
