#!/usr/bin/env python3
"""Run a static x86-64 Linux program under Bochs, on a CPU model with AVX-512.

For machines whose own processor lacks AVX-512 (QEMU's TCG has none of it): Bochs interprets the real
machine code, so integer and floating-point results are those of the instruction set, bit for bit.

    g++ -O2 -static -mavx512f -mavx512bw -mavx512vl -mavx512dq prog.cpp -o prog
    python3 tests/emulate/run_avx512.py prog [arguments of prog]
    python3 tests/emulate/run_avx512.py --file golden.bin prog /golden.bin

The program runs as a child of init, as root, from a RAM disk; files given with --file lie in "/". Its
stdout and stderr, byte for byte and together, become the stdout of this script.

Exit status: the program's own; 128+N when signal N killed it (132 is an illegal instruction); 124 past
the time limit; 125 when the guest died before the program ended; 77 when something needed is missing.

Debian packages: bochs bochsbios bochs-term isolinux syslinux-common xorriso gcc libc6-dev, and a kernel
image, which only has to be unpacked (MISSING_KERNEL below says how). Verified with Bochs 2.7 and the
6.1 cloud kernel.

A run costs about 18 s of processor time before the program starts (Zen 3); then Bochs does about 45
million scalar instructions, 10 million 512-bit integer operations or 1.5 million 512-bit fused
multiply-adds a second. Keep test sizes small and do many tests in one run. Output passes a serial line
of 11 kB a second. Take no times inside the guest: its clock counts instructions, not seconds.
"""

from __future__ import annotations

import argparse
import glob
import os
import pty
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARE = Path("/usr/share/bochs")
BIOS = SHARE / "BIOS-bochs-latest"
VGABIOS = SHARE / "VGABIOS-lgpl-latest"
ISOLINUX = Path("/usr/lib/ISOLINUX/isolinux.bin")
LDLINUX = Path("/usr/lib/syslinux/modules/bios/ldlinux.c32")
TERM_PLUGIN = "/usr/lib/*/bochs/plugins/libbx_term_gui.so"
KERNEL_CACHE = Path.home() / ".cache" / "avx512-kernel"

MISSING_KERNEL = f"""a kernel; name one with --kernel, or unpack Debian's, about 27 MB to fetch:
    mkdir -p {KERNEL_CACHE} && cd {KERNEL_CACHE} &&
    apt-get download "$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/.*Depends: //p')" &&
    dpkg-deb -x linux-image-*.deb ."""

# The clearcpuid list works around what Bochs 2.7 reports inconsistently:
# - the size of the compacted XSAVE area is wrong (CPUID leaf 0xD, 1), and PKRU state has no offset; the
#   kernel would then disable XSAVE, and AVX with it;
# - "fast strings" are off in MSR 0x1A0 while FSRM is on: memmove of Linux before 6.3 is broken then.
KERNEL_ARGUMENTS = (
    "console=ttyS0,115200 quiet loglevel=1 clearcpuid=xsavec,xsaves,pku,ospke,fsrm mitigations=off "
    "tsc=reliable lpj=4000000 cryptomgr.notests random.trust_cpu=on panic=-1 reboot=t"
)

# Bochs stops when "Shutdown" is written to port 0x8900. The terminal is made raw for exact bytes.
INIT_C = r"""
#include <stdio.h>
#include <sys/io.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

int main(int argc, char **argv) {
    struct termios tty;
    tcgetattr(1, &tty);
    cfmakeraw(&tty);
    tcsetattr(1, TCSANOW, &tty);
    mount("none", "/proc", "proc", 0, 0);
    dprintf(1, "@@begin@@\n");
    pid_t child = fork();
    if (child == 0) {
        static char *arguments[] = {ARGUMENTS, 0};
        static char *environment[] = {"PATH=/", "HOME=/", ENVIRONMENT 0};
        execve("/program", arguments, environment);
        perror("cannot run the program");
        _exit(127);
    }
    int status = 0;
    while (waitpid(-1, &status, 0) != child) {
    }
    int code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
    dprintf(1, "@@exit %d@@\n", code);
    tcdrain(1);
    iopl(3);
    for (const char *c = "Shutdown"; *c; c++) outb(*c, 0x8900);
    for (;;) pause();
}
"""


def find_kernel(named: Path | None) -> Path | None:
    if named is not None:
        return named if named.is_file() else None
    images = sorted(KERNEL_CACHE.glob("boot/vmlinuz-*")) or sorted(Path("/boot").glob("vmlinuz-*-amd64"))
    return images[-1] if images else None


def missing_tools() -> list[str]:
    wanted = {
        "package bochs": shutil.which("bochs-bin") and VGABIOS.exists(),
        "package bochsbios": BIOS.exists(),
        "package bochs-term": glob.glob(TERM_PLUGIN),
        "package isolinux": ISOLINUX.exists(),
        "package syslinux-common": LDLINUX.exists(),
        "package xorriso": shutil.which("xorriso"),
        "package gcc": shutil.which("gcc"),
    }
    return [name for name, present in wanted.items() if not present]


def c_string(text: str) -> str:
    return '"' + "".join(f"\\{byte:03o}" for byte in os.fsencode(text)) + '"'


def build_init(directory: Path, arguments: list[str], environment: list[str]) -> bytes:
    source = INIT_C.replace("ARGUMENTS", ", ".join(map(c_string, arguments)))
    source = source.replace("ENVIRONMENT", "".join(c_string(entry) + ", " for entry in environment))
    (directory / "init.c").write_text(source)
    subprocess.run(
        ["gcc", "-Os", "-static", "-o", directory / "init", directory / "init.c"],
        check=True,
    )
    return (directory / "init").read_bytes()


def cpio_entry(name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)) -> bytes:
    """One member of a "newc" archive; written here since mknod of /dev/console would need root."""
    path = name.encode() + b"\0"
    inode, owner, group, links, changed, check = 0, 0, 0, 1, 0, 0
    fields = (inode, mode, owner, group, links, changed, len(data), 0, 0, *device, len(path), check)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + path
    return head + bytes(-len(head) % 4) + data + bytes(-len(data) % 4)


def initramfs(init: bytes, program: Path, files: list[Path]) -> bytes:
    members = [
        cpio_entry("dev", stat.S_IFDIR | 0o755),
        cpio_entry("proc", stat.S_IFDIR | 0o755),
        cpio_entry("tmp", stat.S_IFDIR | 0o777),
        cpio_entry("dev/console", stat.S_IFCHR | 0o600, device=(5, 1)),
        cpio_entry("dev/null", stat.S_IFCHR | 0o666, device=(1, 3)),
        cpio_entry("init", stat.S_IFREG | 0o755, init),
        cpio_entry("program", stat.S_IFREG | 0o755, program.read_bytes()),
        *(cpio_entry(path.name, stat.S_IFREG | 0o755, path.read_bytes()) for path in files),
        cpio_entry("TRAILER!!!", 0),
    ]
    return b"".join(members)


def write_boot_disc(directory: Path, kernel: Path, ramdisk: bytes) -> Path:
    tree = directory / "disc"
    tree.mkdir()
    shutil.copyfile(kernel, tree / "vmlinuz")
    shutil.copyfile(ISOLINUX, tree / "isolinux.bin")
    shutil.copyfile(LDLINUX, tree / "ldlinux.c32")
    (tree / "initrd").write_bytes(ramdisk)
    (tree / "isolinux.cfg").write_text(
        f"DEFAULT run\nPROMPT 0\nLABEL run\n KERNEL vmlinuz\n APPEND initrd=initrd {KERNEL_ARGUMENTS}\n"
    )
    image = directory / "disc.iso"
    boot = ["-b", "isolinux.bin", "-c", "boot.cat", "-no-emul-boot", "-boot-load-size", "4"]
    subprocess.run(
        ["xorriso", "-as", "mkisofs", "-quiet", "-o", image, *boot, "-boot-info-table", tree],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return image


def write_bochs_configuration(directory: Path, disc: Path, cpu: str, megabytes: int) -> Path:
    # A low ips makes serial output cheap: one byte takes ips/11520 instructions.
    path = directory / "bochsrc"
    path.write_text(f"""\
display_library: term
config_interface: textconfig
romimage: file={BIOS}
vgaromimage: file={VGABIOS}
cpu: model={cpu}, count=1, ips=50000000, reset_on_triple_fault=0
memory: guest={megabytes}, host={megabytes}
clock: sync=none, time0=946684800
ata0-master: type=cdrom, path={disc}, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={directory / "serial"}
log: {directory / "log"}
panic: action=fatal
error: action=ignore
info: action=ignore
debug: action=ignore
""")
    # Debian builds Bochs with its debugger, which waits for a command before it starts.
    (directory / "continue").write_text("c\n")
    return path


def emulate(directory: Path, configuration: Path, limit: float) -> bool:
    """Run Bochs until it ends; True if it had to be stopped at the limit of `limit` seconds.

    The only screen that Debian's Bochs can draw without X or a network port needs a terminal."""
    command = ["bochs-bin", "-q", "-f", str(configuration), "-rc", str(directory / "continue")]
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm"
        os.nice(10)
        os.execvp(command[0], command)
    deadline = time.monotonic() + limit
    late = False
    try:
        with (directory / "screen").open("wb") as screen:
            while not late:
                if select.select([terminal], [], [], 0.5)[0]:
                    try:
                        screen.write(os.read(terminal, 65536))
                    except OSError:  # Linux's end of file on a terminal whose other side has closed
                        break
                late = time.monotonic() > deadline
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)
    return late


def main() -> int:
    parser = argparse.ArgumentParser(description="Run a static program under Bochs with AVX-512.")
    parser.add_argument("--file", type=Path, action="append", default=[], help="put this file in /")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--limit", type=float, default=300, help="seconds, boot included (300)")
    parser.add_argument("--memory", type=int, default=256, help="MiB of guest memory (256)")
    parser.add_argument(
        "--cpu",
        default="corei7_icelake_u",
        help="a model of `bochs --help cpu`: corei7_icelake_u (AVX-512 with VNNI, the default), "
        "corei7_skylake_x (AVX-512 without VNNI), corei7_haswell_4770 (AVX2 only)",
    )
    parser.add_argument("--kernel", type=Path, help="a bzImage")
    parser.add_argument("--verbose", action="store_true", help="say on stderr how long the run took")
    parser.add_argument("program", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()

    for path in (options.program, *options.file):
        if not path.is_file():
            parser.error(f"no such file: {path}")
        if path.name in ("dev", "init", "proc", "program", "tmp") and path is not options.program:
            parser.error(f"the name {path.name} is taken in the guest; rename {path}")
    if b"/ld-linux" in options.program.read_bytes()[:4096]:
        parser.error(f"{options.program} is dynamically linked; link it with -static")

    missing = missing_tools()
    kernel = find_kernel(options.kernel)
    if kernel is None:
        missing.append(MISSING_KERNEL)
    if missing or kernel is None:
        print("run_avx512: cannot emulate; missing:", *missing, sep="\n  ", file=sys.stderr)
        return 77

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the directory below is removed
    with tempfile.TemporaryDirectory(prefix="avx512-") as name:
        directory = Path(name)
        init = build_init(directory, [options.program.name, *options.arguments], options.env)
        disc = write_boot_disc(directory, kernel, initramfs(init, options.program, options.file))
        configuration = write_bochs_configuration(directory, disc, options.cpu, options.memory)
        start = time.monotonic()
        late = emulate(directory, configuration, options.limit)
        seconds = time.monotonic() - start
        serial = directory / "serial"
        output = serial.read_bytes() if serial.exists() else b""
        before, begun, output = output.partition(b"@@begin@@\n")
        end = re.search(rb"@@exit (\d+)@@\n\Z", output)
        sys.stdout.buffer.write(output[: end.start()] if end else output)
        sys.stdout.flush()
        if options.verbose:
            print(f"run_avx512: {seconds:.1f} s", file=sys.stderr)
        if end:
            return int(end[1])
        if late:
            print(f"run_avx512: stopped after {options.limit:g} s", file=sys.stderr)
            return 124
        print("run_avx512: the guest died", "in the program" if begun else "at boot", file=sys.stderr)
        screen = (directory / "screen").read_bytes()
        sys.stderr.buffer.write(before[-2000:] + screen[-2000:])
        return 125


if __name__ == "__main__":
    sys.exit(main())
