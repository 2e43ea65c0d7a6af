# A volume that needs a zone.

variable "id" {}

variable "zone" {}

variable "external" {
  default = null
}

id           = var.id
name         = var.id
external_id  = var.external
type         = "csi"
plugin_id    = "fake"
capacity_min = "1MiB"

capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}

topology_request {
  required {
    topology {
      segments {
        zone = var.zone
      }
    }
  }
}
