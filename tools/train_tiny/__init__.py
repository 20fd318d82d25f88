"""The training recipe of the bundled pair, models/tiny-k2 and models/tiny-k2-dflash. See README.md."""
