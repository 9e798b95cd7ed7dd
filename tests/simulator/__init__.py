"""A whole job in one thread, in virtual time, from a seed."""

from tests.simulator.plan import Plan, random_plan
from tests.simulator.replica import StoryFailed
from tests.simulator.story import Machines
from tests.simulator.world import World

__all__ = ["Machines", "Plan", "StoryFailed", "World", "random_plan"]
