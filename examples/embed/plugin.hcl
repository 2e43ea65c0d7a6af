task "plugin" {
  driver = "raw_exec"

  csi_plugin {
    id   = "loopfs"
    type = "monolith"
  }
}
