variable "where" { default = "shared/tools" }
job "x" {
  group "parts" {
    volume "data" {
      type            = "csi"
      source          = "data"
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
    }
    volume "host" {
      type   = "host"
      source = "h"
    }
    task "a" {
      driver = "docker"
      volume_mount {
        volume      = "data"
        destination = "/own"
        sub_path    = "allocs/${NOMAD_ALLOC_ID}/${NOMAD_ALLOC_INDEX}"
      }
      volume_mount {
        volume      = "data"
        destination = "/tools"
        sub_path    = var.where
        read_only   = true
      }
      volume_mount {
        volume      = "host"
        destination = "/host"
        sub_path    = "what/the/host/makes/of/it"
      }
      volume_mount {
        volume      = "data"
        destination = "/null"
        sub_path    = null
      }
    }
  }
  group "whole" {
    volume "data" {
      type            = "csi"
      source          = "data"
      access_mode     = "single-node-multi-writer"
      attachment_mode = "file-system"
    }
    task "b" {
      driver = "docker"
      volume_mount {
        volume      = "data"
        destination = "/data"
      }
    }
  }
}
