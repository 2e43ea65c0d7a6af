job "x" {
  type = "system"
  group "g" {
    count = 2
    volume "each" {
      type            = "csi"
      source          = "s"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      per_alloc       = true
    }
    volume "stuck" {
      type            = "csi"
      source          = "s"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
      sticky          = true
      mount_options {
        mount_flags = ["a\nb"]
      }
    }
    task "t" {
      driver = "exec"
    }
  }
}
