"""Files of images, volumes, recordings and masks as arrays: for training, exported programs and new clients alike."""
