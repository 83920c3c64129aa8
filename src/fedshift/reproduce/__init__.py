"""Papers: every table and figure of FedBN, FedMMB and FedWon, with the printed values as data."""
