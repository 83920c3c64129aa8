"""Messages between coordinator and sites: arrays, signatures, keys, and Flower's programs."""
