"""QEMU's command line for a board: what its snapshots were taken with and must be loaded with."""

from __future__ import annotations

from pathlib import Path

# By board: as many processors as it has, all of them A57, and memory for a measurement or two.
PROCESSORS = {"jetson-nano": 4, "jetson-tx2": 6}
MEMORY_MIB = 1024
# Translated code, of which QEMU would keep up to 1 GiB.
_TRANSLATED_MIB = 256
KERNEL_ARGUMENTS = "console=ttyAMA0 root=/dev/vda rw quiet net.ifnames=0 mitigations=off"


def make_base(board: str) -> list[str]:
    """The machine that the device tree describes."""
    return [
        *("qemu-system-aarch64", "-machine", "virt,gic-version=2", "-cpu", "cortex-a57"),
        *("-smp", str(PROCESSORS[board]), "-m", str(MEMORY_MIB)),
        *("-accel", f"tcg,thread=multi,tb-size={_TRANSLATED_MIB}"),
        *("-nodefaults", "-display", "none"),
    ]


def make_command(board: str, image: Path, disk: Path, cache: str, port: int) -> list[str]:
    """The machine with its disk; the only way into its network leads from the host's loopback `port` to SSH."""
    network = f"user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:{port}-:22"
    return [
        *make_base(board),
        *("-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd.gz"), "-dtb", str(image / "board.dtb")),
        *("-append", KERNEL_ARGUMENTS, "-drive", f"file={disk},format=qcow2,if=none,id=disk,cache={cache}"),
        *("-device", "virtio-blk-pci,drive=disk", "-device", "virtio-rng-pci", "-netdev", network),
        *("-device", "virtio-net-pci,netdev=net,romfile="),
    ]
