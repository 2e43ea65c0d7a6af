job "devices" {
  group "g" {
    volume "disk" {
      type            = "csi"
      source          = "disk"
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
    }
    task "t" {
      driver = "docker"
      volume_mount {
        volume           = "disk"
        destination      = "/dev/xvdb"
        propagation_mode = "private"
        selinux_label    = ""
      }
      volume_mount {
        volume           = "disk"
        destination      = "/dev/xvdc"
        propagation_mode = "host-to-task"
        selinux_label    = "Z"
      }
    }
  }
}
