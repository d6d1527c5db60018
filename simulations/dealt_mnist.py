"""MNIST dealt to any number of users: the same 60,000 images, in fewer or more hands."""

from fedpriv.data import Population, load_mnist_writers
from fedpriv.data.partition import iid, partition


def people(users: int, seed: int = 0, folder: str | None = None) -> Population:
    """Deal MNIST's training images at random to users, in parts as equal as can be.

    Args:
        users: how many; at most 60,000.
        seed: of the dealing, any integer ≥ 0.
        folder: with MNIST's files; None means the environment variable FEDPRIV_DATA.

    Returns:
        Population with x float32 [rows, 1, 28, 28] and y int64 [rows] in 0..9; MNIST's test images
        are held out.

    Raises:
        DataError: a file is absent or damaged.
        InvalidValueError: `users` or `seed` is out of range.
    """
    writers = load_mnist_writers(folder)
    dealt = partition(writers.users.fields, iid(writers.users.rows, users, seed))
    test = {name: writers.test[name] for name in ("x", "y")}
    return Population(f"mnist: {users} users, iid, seed {seed}", dealt, test)
