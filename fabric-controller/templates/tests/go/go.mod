module weft.dev/gateway-templates/oracle

go 1.21
