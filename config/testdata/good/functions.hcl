# What Nomad's language offers and these do not need a clock, a dice or a directory.
locals {
  plan = { nets = [for i in range(3) : cidrsubnet("10.20.0.0/16", 8, i)], on = true }
}
job "functions" {
  group "g" {
    task "t" {
      driver = "docker"
      config {
        host      = cidrhost("10.20.3.77/24", 5)
        last      = cidrhost("10.20.3.0/24", -1)
        host6     = cidrhost("fd00:1::/64", 258)
        mask      = cidrnetmask("172.16.0.0/12")
        subnet    = cidrsubnet("172.16.0.0/12", 4, 2)
        subnet6   = cidrsubnet("fd00:1::/48", 16, 10)
        converted = convert(["1", 2], list(number))
        backwards = reverse("abc")
        last_one  = reverse(["a", "${NOMAD_ALLOC_ID}"])
        yaml      = yamlencode(local.plan)
        with_ref  = yamlencode({ addr = "${NOMAD_ADDR_http}" })
        key       = "${file("${pathexpand("motd.txt")}")}"
        home      = pathexpand("~/.ssh/id")
        in_base64 = filebase64("motd.txt")
      }
    }
  }
}
