job "devices" {
  group "g" {
    volume "disk" {
      type            = "csi"
      source          = "disk"
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
    }
    volume "files" {
      type            = "csi"
      source          = "files"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    volume "host" {
      type   = "host"
      source = "h"
    }
    task "t" {
      driver = "exec"
      volume_mount {
        volume      = "files"
        destination = "/dev/xvdb/files"
      }
      volume_mount {
        volume      = "disk"
        destination = "/dev/xvdb"
      }
      volume_mount {
        volume      = "disk"
        destination = "/dev/xvdc"
        read_only   = true
      }
      volume_mount {
        volume      = "host"
        destination = "/dev/xvdc/below"
      }
      volume_mount {
        volume      = "host"
        destination = "data"
      }
      volume_mount {
        volume      = "files"
        destination = "/data/"
      }
      volume_mount {
        volume      = "disk"
        destination = "dev/null"
      }
      volume_mount {
        volume           = "disk"
        destination      = "/dev"
        propagation_mode = "bidirectional"
      }
    }
  }
}
