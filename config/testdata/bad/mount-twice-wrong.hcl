job "web" {
  group "g" {
    volume "data" {
      type            = "csi"
      source          = "data"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }

    task "t" {
      driver = "exec"

      volume_mount {
        volume           = "dat"
        destination      = "/proc/self"
        propagation_mode = "both"
      }
    }
  }
}
