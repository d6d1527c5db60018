"""MNIST divided among any number of users: always the same 60,000 images."""

from fedpriv.data import Population
from fedpriv.data.partition import iid, partition
from simulations.datasets.mnist import load_mnist_writers


def people(users: int, seed: int = 0, folder: str | None = None) -> Population:
    """Deal MNIST's training images to users at random, in parts that differ by at most one.

    x is float32 [rows, 1, 28, 28] and y int64 [rows] in 0..9; MNIST's test images are held out. Its
    files are in the folder (None: FEDPRIV_DATA).
    """
    writers = load_mnist_writers(folder)
    users_data = partition(writers.users.fields, iid(writers.users.rows, users, seed))
    test = {name: writers.test[name] for name in ("x", "y")}
    return Population(f"mnist: {users} users, iid, seed {seed}", users_data, test)
