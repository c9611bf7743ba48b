"""C++ throws where nothing may be thrown: std::terminate, which says what was thrown and calls abort()."""

from native import library


def load_dataset() -> None:
    defects.read_dataset()


defects = library()
print("ready", flush=True)
load_dataset()
