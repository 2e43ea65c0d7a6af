job "options" {
  group "g" {
    volume "v0" {
      type            = "csi"
      source          = "v0"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = "a b" }
    }
    volume "v1" {
      type            = "csi"
      source          = "v1"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = "a,uid=0" }
    }
    volume "v2" {
      type            = "csi"
      source          = "v2"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = -1 }
    }
    volume "v3" {
      type            = "csi"
      source          = "v3"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = 1.5 }
    }
    volume "v4" {
      type            = "csi"
      source          = "v4"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = "007" }
    }
    volume "v5" {
      type            = "csi"
      source          = "v5"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = 4294967295 }
    }
    volume "v6" {
      type            = "csi"
      source          = "v6"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = 4294967296 }
    }
    volume "v7" {
      type            = "csi"
      source          = "v7"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = ["a"] }
    }
    volume "v8" {
      type            = "csi"
      source          = "v8"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = "${NOMAD_META_group}" }
    }
    volume "v9" {
      type            = "csi"
      source          = "v9"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = "-x" }
    }
    volume "v10" {
      type            = "csi"
      source          = "v10"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
      mount_options { mount_group = "gggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggggg" }
    }
    volume "names" {
      type            = "csi"
      source          = "names"
      access_mode     = null
      attachment_mode = "file-system"
      mount_options {
        mount_grp   = "g"
        mount_flags = [join("", range(1000)), join("", range(1000))]
      }
    }
    task "t" { driver = "exec" }
  }
}
