variable "share" { default = "//nas/tmp" }
variable "server" {
  type    = string
  default = null
}
job "inline" {
  type = "system"
  group "g" {
    volume "scratch" {
      type = "csi"
      ephemeral {
        plugin_id = "smb"
        context {
          "csi.example.com/quoted" = "key"
          source                   = var.share
          size                     = 10
          literal                  = "$${NOMAD_ALLOC_ID}"
          path                     = <<-EOT
            a
          EOT
        }
        secrets {
          password    = { file = "/run/smb/password" }
          "quoted/k"  = { env = "SMB_USER" }
          token       = { callback = "smb/token" }
        }
      }
      mount_options {
        fs_type     = "cifs"
        mount_flags = ["vers=3.0"]
        mount_group = 1000
      }
    }
    volume "certificates" {
      type        = "csi"
      source      = var.server
      access_mode = "single-node-reader-only"
      read_only   = true
      per_alloc   = false
      ephemeral {
        plugin_id = "certs"
        context   = { name = "web", "dns" : "a.example.com" }
        secrets   = {}
      }
    }
    volume "disk" {
      type            = "csi"
      attachment_mode = "block-device"
      ephemeral { plugin_id = "lvm" }
    }
    dynamic "volume" {
      for_each = ["a", "b"]
      labels   = [volume.value]
      content {
        type        = "csi"
        access_mode = "single-node-multi-writer"
        ephemeral {
          plugin_id = "lvm"
          context {
            "pool/of" = volume.value
          }
        }
      }
    }
    task "t" {
      driver = "docker"
      volume_mount {
        volume      = "scratch"
        destination = "local/scratch"
      }
      volume_mount {
        volume      = "certificates"
        destination = "${NOMAD_SECRETS_DIR}/certs"
      }
      volume_mount {
        volume      = "disk"
        destination = "dev/sdx"
      }
    }
  }
}
