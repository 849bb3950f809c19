"""fastir: reinforcement learning for multi-turn tool-integrated reasoning."""

__version__ = "0.1.0"
