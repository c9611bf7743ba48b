"""C++ throws in a noexcept function: std::terminate prints the exception and calls abort()."""

from native import library


def load_dataset() -> None:
    defects.read_dataset()


defects = library()
print("ready", flush=True)
load_dataset()
