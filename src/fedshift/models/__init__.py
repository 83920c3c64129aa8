"""Networks of the papers. A model is made by a factory ``make(sample_shape, classes) -> nn.Module``.

Names resolve without a registry: ``digit-cnn-bn`` is ``fedshift.models.digit_cnn_bn``; a factory of yours is
``my_package.module:function``.
"""
