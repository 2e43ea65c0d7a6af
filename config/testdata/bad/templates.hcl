variable "key" { default = "~/.ssh/id_rsa" }
job "published" {
  group "g" {
    volume "whole" {
      type            = "csi"
      source          = "${volume_id}"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    volume "part" {
      type            = "csi"
      source          = "vol-${zone}"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    volume "index" {
      type            = "csi"
      source          = "vol[${NOMAD_ALLOC_INDEX}]"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    task "t" {
      driver = "exec"
      env {
        KEY = file(pathexpand(var.key))
      }
    }
  }
}
