"""Image processor of the test verifier: it counts an image's tokens, all that a text-only server asks."""

from transformers.image_processing_utils import BaseImageProcessor


class KimiTinyImageProcessor(BaseImageProcessor):
    model_type = "kimi_k25"
    model_input_names = ["pixel_values", "grid_thws"]

    def __init__(self, media_proc_cfg, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg
        self.num_frames_per_chunk = media_proc_cfg["temporal_merge_kernel_size"]

    def media_tokens_calculator(self, media):
        frame = media["image"] if media["type"] == "image" else media["video_chunk"][0]
        side = self.media_proc_cfg["patch_size"] * self.media_proc_cfg["merge_kernel_size"]
        width, height = frame.size
        return -(-width // side) * -(-height // side)

    def preprocess(self, medias, return_tensors=None, **kwargs):
        raise NotImplementedError("kimi-tiny reads text only: serve it with --language-model-only")
