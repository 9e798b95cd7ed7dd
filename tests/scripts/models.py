"""Models with a custom `train_step` and without `call`, as users write them for one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

FEATURES = 6
CODE = 2


def data(rows: int, *columns: int) -> list[np.ndarray]:
    """Arrays of normal numbers with these numbers of columns, the same in every process."""
    random = np.random.default_rng(11)
    return [random.normal(size=(rows, count)).astype("float32") for count in columns]


def values(*variables: Any) -> list[np.ndarray]:
    """The values of lists of variables, for a script to return."""
    return [variable.numpy() for group in variables for variable in group]


class Autoencoder(keras.Model):
    """A variational autoencoder whose parts are built by its first step; its noise may come with the data."""

    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        between = [layers.BatchNormalization()] if normalized else []
        self.encoder = keras.Sequential([layers.Dense(8, "tanh"), *between, layers.Dense(2 * CODE)])
        self.decoder = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(FEATURES)])
        self.seeds = keras.random.SeedGenerator(3)
        self.total = keras.metrics.Mean(name="total_loss")
        self.distance = keras.metrics.Mean(name="distance")

    @property
    def metrics(self) -> list[Any]:
        """Reset at the start of each epoch."""
        return [self.total, self.distance]

    def losses_of(self, data: Any, training: bool) -> Any:
        images, noise = data if isinstance(data, tuple) else (data, None)
        mean, spread = ops.split(self.encoder(images, training=training), 2, axis=1)
        if noise is None:
            noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        found = self.decoder(mean + ops.exp(0.5 * spread) * noise)
        distance = ops.mean(ops.sum(ops.square(images - found), axis=1))
        divergence = ops.mean(ops.sum(ops.exp(spread) + ops.square(mean) - 1.0 - spread, axis=1)) / 2
        return distance + divergence, distance

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            total, distance = self.losses_of(data, training=True)
        gradients = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(total)
        self.distance.update_state(distance)
        return {"loss": self.total.result(), "distance": self.distance.result()}

    def test_step(self, data: Any) -> Any:
        total, distance = self.losses_of(data, training=False)
        self.total.update_state(total)
        self.distance.update_state(distance)
        return {m.name: m.result() for m in self.metrics}


def network(inputs: int, outputs: int) -> keras.Model:
    return keras.Sequential([keras.Input((inputs,)), layers.Dense(8, "tanh"), layers.Dense(outputs)])


class Adversaries(keras.Model):
    """A generator and a discriminator with an optimizer each, and one loss in the compiled way."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = network(CODE, FEATURES)
        self.discriminator = network(FEATURES, 1)
        self.generator_loss = keras.metrics.Mean(name="generator_loss")
        self.discriminator_loss = keras.metrics.Mean(name="discriminator_loss")

    def compile(self, optimizers: dict[str, Any], loss_fn: Any) -> None:
        super().compile()
        self.optimizers = optimizers
        self.loss_fn = loss_fn

    def train_step(self, data: Any) -> Any:
        real, noise = data
        rows = ops.shape(real)[0]
        both = ops.concatenate([real, self.generator(noise)], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            judged = self.loss_fn(labels, self.discriminator(both, training=True))
        weights = self.discriminator.trainable_weights
        self.optimizers["discriminator"].apply(tape.gradient(judged, weights), weights)
        with tf.GradientTape() as tape:
            found = self.discriminator(self.generator(noise, training=True))
            loss = self.loss_fn(ops.ones((rows, 1)), found)
        weights = self.generator.trainable_weights
        self.optimizers["generator"].apply(tape.gradient(loss, weights), weights)
        self.discriminator_loss.update_state(judged)
        self.generator_loss.update_state(loss)
        return {"d_loss": self.discriminator_loss.result(), "g_loss": self.generator_loss.result()}


class Critics(keras.Model):
    """A Wasserstein GAN: several critic steps for one of the generator, and a gradient penalty."""

    def __init__(self, critic_steps: int) -> None:
        super().__init__()
        self.generator = network(CODE, FEATURES)
        self.critic = network(FEATURES, 1)
        self.critic_steps = critic_steps

    def compile(self, critic_optimizer: Any, generator_optimizer: Any) -> None:
        super().compile()
        self.critic_optimizer = critic_optimizer
        self.generator_optimizer = generator_optimizer

    def penalty(self, real: Any, made: Any, mix: Any) -> Any:
        between = real + mix * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            judged = self.critic(between, training=True)
        slope = ops.sqrt(ops.sum(ops.square(tape.gradient(judged, between)), axis=1))
        return ops.mean(ops.square(slope - 1.0))

    def train_step(self, data: Any) -> Any:
        real, (noise, mix) = data
        for turn in range(self.critic_steps):
            with tf.GradientTape() as tape:
                made = self.generator(noise[:, turn], training=True)
                distance = ops.mean(self.critic(made)) - ops.mean(self.critic(real, training=True))
                cost = distance + 10.0 * self.penalty(real, made, mix)
            weights = self.critic.trainable_variables
            self.critic_optimizer.apply_gradients(zip(tape.gradient(cost, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            loss = -ops.mean(self.critic(self.generator(noise[:, -1], training=True)))
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"critic": cost, "generator": loss}


class ForwardLayer(layers.Layer):
    """A layer that is trained on its own: strongly active on good rows, weakly on bad ones."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.dense = layers.Dense(units, "relu")
        self.optimizer = keras.optimizers.Adam(0.03, clipnorm=0.1)
        self.loss = keras.metrics.Mean(name="loss")

    def call(self, inputs: Any) -> Any:
        norm = ops.sqrt(ops.sum(ops.square(inputs), axis=1, keepdims=True))
        return self.dense(inputs / (norm + 1e-4))

    def learn(self, good: Any, bad: Any) -> Any:
        with tf.GradientTape() as tape:
            strong = ops.mean(ops.square(self(good)), axis=1) - 0.5
            weak = ops.mean(ops.square(self(bad)), axis=1) - 0.5
            loss = ops.mean(ops.softplus(ops.concatenate([-strong, weak], axis=0)))
        weights = self.dense.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        self.loss.update_state(loss)
        return self(good), self(bad)


class ForwardForward(keras.Model):
    """Layers with optimizers of their own, trained one after the other inside one step."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [ForwardLayer(8), ForwardLayer(4)]

    def train_step(self, data: Any) -> Any:
        good, bad = data
        for part in self.parts:
            good, bad = part.learn(good, bad)
        return {f"loss_{place}": part.loss.result() for place, part in enumerate(self.parts)}
