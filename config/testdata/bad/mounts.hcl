job "x" {
  group "g" {
    volume "data" {
      type            = "csi"
      source          = "s"
      access_mode     = "multi-node-multi-writer"
      attachment_mode = "file-system"
    }
    task "t" {
      driver = "exec"
      volume_mount {
        volume      = "dta"
        destination = "/data"
      }
      volume_mount {
        volume = "data"
      }
      volume_mount {
        volume           = "data"
        destination      = "relative/../../path"
        propagation_mode = "shared"
        selinux_label    = "q"
      }
      volume_mount {
        volume      = "data"
        destination = "/srv"
      }
      volume_mount {
        volume      = "data"
        destination = "/srv"
        path        = "sub"
      }
      volume_mount {
        volume      = "data"
        destination = ""
      }
      volume_mount {
        volume      = "data"
        destination = "./dev"
      }
      volume_mount {
        volume      = "data"
        destination = "/data/${NOMAD_ALLOC_INDEX}"
      }
    }
  }
}
