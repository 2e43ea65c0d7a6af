job "published" {
  group "g" {
    volume "whole" {
      type            = "csi"
      source          = "${Volume.name}"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    volume "node" {
      type            = "csi"
      source          = "${node.class}"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    task "t" { driver = "exec" }
  }
}
