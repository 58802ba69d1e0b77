"""The outer config as code in the model folder: Kimi-K2.5 ships its own beside transformers' class."""

from transformers import DeepseekV3Config, PretrainedConfig


class KimiTinyVisionConfig(PretrainedConfig):
    model_type = "kimi_k25_vision"


class KimiTinyConfig(PretrainedConfig):
    model_type = "kimi_k25"
    sub_configs = {"text_config": DeepseekV3Config, "vision_config": KimiTinyVisionConfig}

    def __init__(self, text_config=None, vision_config=None, **kwargs):
        if isinstance(text_config, dict) or text_config is None:
            text_config = DeepseekV3Config(**(text_config or {}))
        if isinstance(vision_config, dict) or vision_config is None:
            vision_config = KimiTinyVisionConfig(**(vision_config or {}))
        self.text_config = text_config
        self.vision_config = vision_config
        if getattr(text_config, "quantization_config", None) is not None:
            self.quantization_config = text_config.quantization_config
        super().__init__(**kwargs)
