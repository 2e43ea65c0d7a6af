job "x" {
  update {
    canary = 1
  }
  group "g" {
    count = 2
    volume "nothing" {}
    volume "empty" {
      type = "csi"
    }
    volume "modes" {
      type            = "csi"
      source          = "modes"
      access_mode     = "read-write"
      attachment_mode = "filesystem"
    }
    volume "block" {
      type            = "csi"
      source          = "block"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "block-device"
      mount_options {
        fs_type = "ext4"
      }
    }
    volume "canary" {
      type            = "csi"
      source          = "canary"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      per_alloc       = true
    }
    volume "reader" {
      type            = "csi"
      source          = "reader"
      access_mode     = "multi-node-reader-only"
      attachment_mode = "file-system"
    }
    volume "single" {
      type            = "csi"
      source          = "single"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    volume "one-writer" {
      type            = "csi"
      source          = "one-writer"
      access_mode     = "multi-node-single-writer"
      attachment_mode = "file-system"
    }
    volume "single" {
      type = "host"
    }
    volume "other" {
      type   = "nfs"
      source = "other"
    }
    task "t" {
      driver = "exec"
    }
  }
}
