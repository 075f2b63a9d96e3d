"""Compiles the device where it is not compiled yet, and prints where the library lies."""

from pathlib import Path

from torch.utils import cpp_extension

if __name__ == "__main__":
    source = Path(__file__).with_name("device.cpp")
    # -O0: it is the compiler that takes the time here. Nothing of Python's is used.
    cpp_extension.load("shadowrun_cpp_device", [str(source)], extra_cflags=["-O0"], is_python_module=False)
    folder = cpp_extension._get_build_directory("shadowrun_cpp_device", verbose=False)
    print(Path(folder) / "shadowrun_cpp_device.so")
