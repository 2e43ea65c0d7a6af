# A field that the next release knows: the one before refuses it.
job "disk" {
  group "plugin" {
    task "disk" {
      driver = "exec"

      csi_plugin {
        id          = "disk"
        type        = "node"
        scratch_dir = "/scratch"
      }
    }
  }
}
