variable "unset" { type = string }
variable "bad" {
  type    = number
  default = "x"
}
variable "twice" { default = 1 }
variable "twice" { default = 2 }
variable "checked" {
  default = 1
  validation {
    condition     = var.checked > 1
    error_message = "It has to be more than 1."
  }
}
variable "typo" { defualt = 1 }
locals {
  a = local.b
  b = local.a
  c = local.missing
}
job "x" {
  name = var.unknown
  group "g" {
    count = vars.x
    task "t" {
      driver = "exec"
      config {
        a = timestamp()
        b = uper("x")
        c = upper("${node.unique.id}")
        d = file("missing")
        e = "${vars.image}"
        f = plain
      }
    }
  }
}
