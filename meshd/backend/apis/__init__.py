"""The APIs of the bundled upstream, one file each: pure functions from a call to a reply."""
