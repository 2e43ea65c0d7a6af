variable "empty" { default = "" }
job "x" {
  group "g" {
    volume "data" {
      type            = "csi"
      source          = "s"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
    }
    volume "disk" {
      type            = "csi"
      source          = "d"
      access_mode     = "single-node-writer"
      attachment_mode = "block-device"
    }
    task "t" {
      driver = "exec"
      volume_mount {
        volume      = "disk"
        destination = "/dev/xvdb"
        sub_path    = "a"
      }
      volume_mount {
        volume      = "data"
        destination = "/1"
        sub_path    = "/etc"
      }
      volume_mount {
        volume      = "data"
        destination = "/2"
        sub_path    = "a/../../b"
      }
      volume_mount {
        volume      = "data"
        destination = "/3"
        sub_path    = "a//b/"
      }
      volume_mount {
        volume      = "data"
        destination = "/4"
        sub_path    = "a\u0000b"
      }
      volume_mount {
        volume      = "data"
        destination = "/5"
        sub_path    = "a\nb"
      }
      volume_mount {
        volume      = "data"
        destination = "/6"
        sub_path    = var.empty
      }
      volume_mount {
        volume      = "data"
        destination = "/7"
        sub_path    = "${NOMAD_TASK_NAME}/${node.unique.id}"
      }
      volume_mount {
        volume      = "data"
        destination = "/8"
        sub_path    = ["a"]
      }
      volume_mount {
        volume      = "data"
        destination = "/9"
        sub_path    = join("/", [for i in range(820) : "name"])
      }
      volume_mount {
        volume      = "data"
        destination = "/10"
        sub_path    = join("", [for i in range(64) : "name"])
      }
      volume_mount {
        volume      = "data"
        destination = "/11"
        subpath     = "a"
      }
    }
  }
}
