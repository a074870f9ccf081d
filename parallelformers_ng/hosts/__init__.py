"""Groups whose ranks are on several hosts: who starts them there, and how they are steered from here."""
