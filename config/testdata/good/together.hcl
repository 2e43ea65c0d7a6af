job "together" {
  group "g" {
    volume "writer" {
      type            = "csi"
      source          = "data"
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
      mount_options {
        mount_group = "www-data"
      }
    }
    volume "reader" {
      type            = "csi"
      source          = "data"
      read_only       = true
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
    }
    volume "one" {
      type            = "csi"
      source          = "each"
      access_mode     = "multi-node-single-writer"
      attachment_mode = "block-device"
    }
    volume "other" {
      type            = "csi"
      source          = "each"
      read_only       = true
      access_mode     = "multi-node-single-writer"
      attachment_mode = "block-device"
    }
    volume "mine" {
      type            = "csi"
      source          = "each"
      per_alloc       = true
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    task "t" {
      driver = "exec"
      volume_mount {
        volume      = "writer"
        destination = "/data"
      }
      volume_mount {
        volume      = "writer"
        destination = "/data/below"
        read_only   = true
      }
      volume_mount {
        volume      = "reader"
        destination = "/reader"
      }
      volume_mount {
        volume      = "one"
        destination = "/dev/disk/by-path/pci-0000:00:1f.2"
      }
      volume_mount {
        volume      = "other"
        destination = "/dev/other"
      }
      volume_mount {
        volume      = "other"
        destination = "/dev/other2"
        read_only   = true
      }
    }
  }
}
