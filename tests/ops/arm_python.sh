#!/bin/sh
# tests/ops/arm_python.sh DIRECTORY makes DIRECTORY/python: a Python of ARM with torch, run by an emulator, for
# test_kernel_build.py. On Debian as root, with debootstrap, qemu-user-static and g++-aarch64-linux-gnu; about 8 GB, most of
# it the CUDA that PyPI's torch for ARM asks for. The compiler is a program of this machine, which the emulated Python calls.
set -e
cd "$(dirname "$0")/../.."
made=$(realpath -m "$1")
mkdir -p "$made"
debootstrap --arch=arm64 --foreign --variant=minbase --include=python3.11,libgomp1 bookworm "$made/root"
for package in "$made"/root/var/cache/apt/archives/*.deb; do dpkg -x "$package" "$made/root"; done

set --
for version in 17 18 24 25 26 27 28 31; do set -- "$@" --platform "manylinux_2_${version}_aarch64"; done
python3 -m pip install --target "$made/site" --python-version 3.11 --only-binary=:all: "$@" --platform manylinux2014_aarch64 \
  -c constraints.txt torch transformers safetensors gguf jinja2 accelerate numpy tqdm psutil rich setuptools \
  pytest hypothesis jsonschema compressed-tensors

# What torch asks Linux about the CPU, of which qemu 7 shows that of this machine.
for cpu in 0 1; do
  mkdir -p "$made/root/sys/devices/system/cpu/cpu$cpu/regs/identification"
  echo 0x00000000413fd0c1 > "$made/root/sys/devices/system/cpu/cpu$cpu/regs/identification/midr_el1"
  printf 'processor\t: %s\nFeatures\t: fp asimd atomics fphp asimdhp\nCPU implementer\t: 0x41\nCPU architecture: 8\n' "$cpu"
  printf 'CPU variant\t: 0x3\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
done > "$made/root/proc/cpuinfo"

cat > "$made/python" << END
#!/bin/sh
export PYTHONPATH="$made/site\${PYTHONPATH:+:\$PYTHONPATH}" CXX=/usr/bin/aarch64-linux-gnu-g++ OMP_NUM_THREADS=1
exec qemu-aarch64-static -L "$made/root" "$made/root/usr/bin/python3.11" "\$@"
END
chmod +x "$made/python"
