"""A small Flower app that became FedBN in five lines."""
