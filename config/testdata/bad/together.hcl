job "together" {
  group "modes" {
    volume "disk" {
      type            = "csi"
      source          = "s"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "block-device"
    }
    volume "files" {
      type            = "csi"
      source          = "s"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
    }
    volume "local" {
      type            = "csi"
      source          = "s"
      access_mode     = "single-node-multi-writer"
      attachment_mode = "block-device"
    }
    task "t" { driver = "exec" }
  }
  group "alone" {
    volume "a" {
      type            = "csi"
      source          = "s"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    volume "b" {
      type            = "csi"
      source          = "s"
      read_only       = true
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    volume "c" {
      type            = "csi"
      source          = "t"
      access_mode     = "multi-node-single-writer"
      attachment_mode = "file-system"
    }
    volume "d" {
      type            = "csi"
      source          = "t"
      access_mode     = "multi-node-single-writer"
      attachment_mode = "file-system"
    }
    task "t" { driver = "exec" }
  }
  group "options" {
    volume "a" {
      type            = "csi"
      source          = "s"
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
      mount_options {
        fs_type     = "ext4"
        mount_flags = ["noatime"]
      }
    }
    volume "b" {
      type            = "csi"
      source          = "s"
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
      mount_options {
        mount_flags = ["hunter2"]
      }
    }
    task "t" { driver = "exec" }
  }
}
