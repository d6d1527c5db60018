"""MNIST dealt to any number of users: the same 60,000 images, in fewer or more hands."""

from fedpriv.data import Population
from fedpriv.data.partition import iid, partition
from simulations.datasets.mnist import load_mnist_writers


def people(users: int, seed: int = 0, folder: str | None = None) -> Population:
    """Deal MNIST's training images at random to users, in parts as equal as can be.

    x is float32 [rows, 1, 28, 28] and y int64 [rows] in 0..9; MNIST's test images are held out. Its
    files are in the folder (None: FEDPRIV_DATA).
    """
    writers = load_mnist_writers(folder)
    dealt = partition(writers.users.fields, iid(writers.users.rows, users, seed))
    test = {name: writers.test[name] for name in ("x", "y")}
    return Population(f"mnist: {users} users, iid, seed {seed}", dealt, test)
