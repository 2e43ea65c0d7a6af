job "owned" {
  group "g" {
    volume "data" {
      type            = "csi"
      source          = "data"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
      mount_options {
        owner       = "postgres"
        group       = 4294967295
        mount_group = "staff"
        mode        = "rwx"
        ownership   = "all"
      }
    }
    volume "same" {
      type            = "csi"
      source          = "data"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
      mount_options {
        mode      = "0700"
        ownership = "recursive"
      }
    }
    volume "block" {
      type            = "csi"
      source          = "disk"
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
      mount_options { owner = 1 }
    }
    task "t" { driver = "exec" }
  }
}
