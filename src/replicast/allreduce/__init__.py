"""Sums arrays over the workers of one host through shared memory. Without TensorFlow; see exchange.py."""

from replicast.allreduce.exchange import Exchange
from replicast.allreduce.layout import Form, Plan
from replicast.allreduce.opening import SEVERAL_HOSTS, open_exchange
from replicast.allreduce.part import Part

__all__ = ["SEVERAL_HOSTS", "Exchange", "Form", "Part", "Plan", "open_exchange"]
