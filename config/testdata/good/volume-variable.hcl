variable "tenant" { default = "acme" }
locals { name = "${var.tenant}-data" }
id        = local.name
plugin_id = "p"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
parameters { tenant = var.tenant }
