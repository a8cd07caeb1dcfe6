"""The local runner over made weights: it measures how evenly their router chooses, before anything else is measured."""

from __future__ import annotations

import msgspec

from dayzero.arch.spec import ModelSpec
from dayzero.blocks.site import Bind
from dayzero.engine.api import EngineInfo
from dayzero.engine.expert_choice import Choices, Evenness
from dayzero.engine.runner import LocalRunner
from dayzero.engine.step_driver import StepDriver
from dayzero.errors import ModelError

PROBE_TOKENS = 64  # of the step that is looked at: some times more choices than most models have experts
PROBE_SEED = 17


class SeededRunner(LocalRunner):
    """``LocalRunner`` for ``seeded:…``. choices: of its routers; evenness: of the probe, None without experts."""

    choices: Choices
    evenness: Evenness | None = None

    def load(self) -> None:
        """As ``LocalRunner.load``; ModelError where experts are chosen so unevenly that a run would be void."""
        inner = self.watch

        def watch(spec: ModelSpec, bind: Bind) -> Bind:
            self.choices = Choices(spec)
            return self.choices.bind(bind if inner is None else inner(spec, bind))

        self.watch = watch
        super().load()
        self.evenness = self._probe()
        refuse_void(self.evenness, self._launch.source)

    def _probe(self) -> Evenness | None:
        """One step of a prompt of random ids."""
        if not self.choices.any:
            return None
        config = self._launch.config
        tokens = min(
            PROBE_TOKENS, config.max_step_tokens, config.chunk_tokens or PROBE_TOKENS, self.info.max_model_len - 1
        )
        driver = StepDriver(self, config)
        driver.add(driver.random_prompts(1, tokens, PROBE_SEED), 1)
        self.choices.listening = True
        try:
            driver.turn()
        finally:
            self.choices.listening = False
            driver.close()
        return self.choices.take()

    @property
    def info(self) -> EngineInfo:
        info = super().info
        if self.evenness is None:
            return info
        facts = info.facts | {"expert_choice": self.evenness.to_json()}
        return msgspec.structs.replace(info, table=[*info.table, ("expert choice", self.evenness.text())], facts=facts)


def refuse_void(found: Evenness | None, source: str) -> None:
    """ModelError for a choice of experts below the floor."""
    if found is not None and found.void:
        raise ModelError(
            f"{source}: experts are chosen too unevenly, so this run is void: {found.text()}; try &seed=N."
        )
