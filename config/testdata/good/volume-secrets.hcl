# Literal secrets, as in volume files of Nomad.
id        = "v"
plugin_id = "p"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}
variable "key" { default = "from a variable" }
secrets {
  user      = "admin"
  number    = 12345
  variable  = var.key
  composed  = upper("x")
  reference = { env = "KEY" }
}
