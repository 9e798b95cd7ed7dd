"""A whole job in one thread, in virtual time, from a seed."""

from replicast.testing.simulation.plan import Plan, random_plan
from replicast.testing.simulation.replica import StoryFailed
from replicast.testing.simulation.story import Machines
from replicast.testing.simulation.world import World

__all__ = ["Machines", "Plan", "StoryFailed", "World", "random_plan"]
