/* Empty on purpose: the build of hip-sys looks for this file. ucm loads the HIP runtime when it runs. */
