"""Papers: every table and figure of FedBN, FedMMB and FedWon, and the values that they print, as data."""
